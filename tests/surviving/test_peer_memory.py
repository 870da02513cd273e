"""What one host's supervisor does for its part of copies: nothing is lost or left at the end, nothing wrong is kept."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from allranks.checkpointing.checkpoint import list_checkpoints
from allranks.checkpointing.going_on import note_going_on
from allranks.checkpointing.host_memory import Record, distrust, left_of, write_record
from allranks.config import Config
from allranks.config_guard import GuardConfig
from allranks.run import Run
from allranks.surviving.memory_tier import open_memory
from allranks.surviving.peer_memory import PeerMemory, open_peer_memory
from allranks.surviving.supervisor import Supervision
from tests.checkpointing.test_peers import save_here
from tests.checkpointing.worlds import header, save_alone
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """In place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def hosts(pool: Pools, run: Run, root: Path) -> Callable[[], list[PeerMemory]]:
    """Two hosts, each with its part of a copy of step 200 that the run's attempt under way has made."""

    def make() -> list[PeerMemory]:
        run.begin_attempt()
        note_going_on(run)
        found = [open_peer_memory(run, wanted=True, root=root, say=told.append) for _ in range(2)]
        parts = [one for one in found if one is not None]
        places = [str(part.directory) for part in parts]

        def case() -> None:
            rank = dist.get_rank()
            made = header(200, run=run.id, generation=run.attempts)
            save_here(Path(places[rank]).parent, ((0,), (1,)), header=made, directory=Path(places[rank]))

        pool(2).run(case)
        for part in parts:
            write_record(part.directory, Record(run.path.resolve(), (str(run.attempts),)))
        return parts

    told.clear()
    return make


told: list[str] = []


def steps(run: Run) -> list[str]:
    return [path.name for path in list_checkpoints(run.checkpoints)]


def give_newer(run: Run, root: Path, first: PeerMemory, *others: PeerMemory) -> None:
    """Step 300, of which the first host lacks a file."""
    made = save_alone(root.parent / "made", 300, header=header(300, run=run.id, generation=run.attempts)).path
    for host in (first, *others):
        shutil.copytree(made, host.directory / made.name)
    next(iter((first.directory / made.name).glob("*.safetensors"))).unlink()


def test_what_the_hosts_have_beyond_the_disk_is_brought_there_by_each(
    run: Run, root: Path, hosts: Callable[[], list[PeerMemory]]
) -> None:
    first, second = hosts()
    supervision = Supervision(GuardConfig(), print, print)
    assert first.followed(supervision) is supervision
    first.close()
    second.close()
    assert steps(run) == ["step-00000200"] and left_of(run.id, root) == []
    assert "step-00000200, which was in the memory of hosts alone, is on the disk now" in told


def test_where_a_save_was_under_way_the_one_before_is_brought(
    run: Run, root: Path, hosts: Callable[[], list[PeerMemory]]
) -> None:
    """The first host has named its part of the next one, which is not whole; the second has not."""
    first, second = hosts()
    give_newer(run, root, first)
    (second.directory / "step-00000200" / "kept-rank-00000.safetensors").unlink()
    first.close()
    second.close()
    assert steps(run) == ["step-00000200"]
    assert "step-00000200, which was in the memory of hosts alone, is on the disk now" in told


def test_of_the_one_before_nothing_is_left_where_the_newest_is_whole(
    run: Run, root: Path, hosts: Callable[[], list[PeerMemory]]
) -> None:
    """Both hosts have two; the first one brings its half of each."""
    first, second = hosts()
    give_newer(run, root, first, second)
    for host in (first, second):
        for kept in (host.directory / "step-00000200").glob("kept-*"):
            kept.unlink()
    first.close()
    assert len(list(run.checkpoints.iterdir())) == 2
    second.close()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000300"]


def test_an_attempt_that_died_before_it_went_on_costs_no_copy(
    run: Run, root: Path, hosts: Callable[[], list[PeerMemory]]
) -> None:
    parts = hosts()
    Run.open(run.path).begin_attempt()
    for part in parts:
        part.close()
    assert steps(run) == ["step-00000200"] and left_of(run.id, root) == []


@pytest.mark.parametrize("what", ["distrusted here", "distrusted elsewhere", "gone on without it", "not noted"])
def test_what_does_not_count_just_goes(run: Run, root: Path, hosts: Callable[[], list[PeerMemory]], what: str) -> None:
    parts = hosts()
    if what == "gone on without it":
        newest = Run.open(run.path)
        newest.begin_attempt()
        note_going_on(newest)
    for part in parts:
        if what == "distrusted here":
            distrust(part.directory)
        if what == "not noted":
            (part.directory / "record.json").unlink()
    if what == "distrusted elsewhere":
        distrust(run.checkpoints)
    for part in parts:
        part.close()
    assert steps(run) == [] and left_of(run.id, root) == [] and told == []


def test_what_a_killed_command_has_left_is_taken_over_or_said_to_be_missed(
    run: Run, root: Path, hosts: Callable[[], list[PeerMemory]]
) -> None:
    first, second = hosts()
    for part in (first, second):
        part._memory.release()
    other = Run.create(root.parent, "task", Config(), {}, directory=root.parent / "other")
    assert open_memory(other, wanted=True, root=root, say=told.append) is not None
    assert len(told) == 2 and all("stays in the memory of this host" in line for line in told)
    told.clear()
    Run.open(run.path).begin_attempt()  # and that one has died before it went on
    third = Run.create(root.parent, "task", Config(), {}, directory=root.parent / "third")
    assert open_memory(third, wanted=True, root=root, say=told.append) is not None
    assert len(told) == 2
    told.clear()
    run.begin_attempt()  # as the leader does before others look
    taken = [open_peer_memory(run, wanted=False, root=root, say=told.append) for _ in range(2)]
    assert [one and one.directory for one in taken] == [first.directory, second.directory] and told == []


def test_without_copies_there_is_nothing(run: Run, root: Path) -> None:
    assert open_peer_memory(run, wanted=False, root=root) is None and list(root.iterdir()) == []


def test_where_no_attempt_went_on_nothing_counts_whatever_a_host_has(run: Run, root: Path) -> None:
    """The others, which have nothing, could not know that this one looks."""
    opened = open_peer_memory(run, wanted=True, root=root)
    assert opened is not None
    opened._memory.release()  # killed before its workers had met
    assert open_peer_memory(run, wanted=False, root=root) is None
    note_going_on(run)
    assert open_peer_memory(run, wanted=False, root=root) is not None
