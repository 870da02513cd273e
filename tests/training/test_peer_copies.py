"""What hosts have together of a copy is what a training goes on from, if the last attempt that went on knew of it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing.checkpoint import list_checkpoints
from allranks.checkpointing.going_on import last_to_go_on, note_going_on
from allranks.checkpointing.host_memory import Record, distrust, is_distrusted, read_record, write_record
from allranks.config import Config
from allranks.launching.environment import ALONE
from allranks.run import Run
from allranks.stepping.alike import everyones
from allranks.stepping.world import Processes
from allranks.training import peer_copies
from allranks.training.peer_copies import bring_copies, hosts_of
from tests.checkpointing.test_peers import save_here
from tests.checkpointing.worlds import flip, header, save_alone
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed
HOSTS = ((0,), (1,), (2,))


class Choice:
    """Of a processor."""

    device = torch.device("cpu")


def processes_here(host: Any = None) -> Processes:
    environment = replace(ALONE, rank=dist.get_rank(), world_size=dist.get_world_size())
    nothing: Any = None
    choice: Any = Choice()
    return Processes(environment, choice, nothing, None, host)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Without an attempt yet."""
    return Run.create(tmp_path, "task", Config(), {}, directory=tmp_path / "run")


@pytest.fixture
def left(pool: Pools, run: Run, tmp_path: Path) -> Callable[[], None]:
    """Three hosts of one rank, whose memories an attempt has left with a copy of step 200; another one has begun."""

    def make() -> None:
        run.begin_attempt()
        note_going_on(run)
        made = header(200, run=run.id, generation=run.attempts)
        pool(3).run(lambda: save_here(tmp_path, HOSTS, header=made).step)
        for number in range(3):
            write_record(tmp_path / str(number), Record(run.path.resolve(), (str(run.attempts),)))
        run.begin_attempt()

    return make


def bring(pool: Pools, run: Run, root: Path, without: tuple[int, ...] = ()) -> tuple[str, list[str]]:
    """`without`: ranks of hosts that have no directory."""

    def case() -> tuple[str, list[str]]:
        memory = None if dist.get_rank() in without else root / str(dist.get_rank())
        if memory is not None:
            memory.mkdir(exist_ok=True)
        processes = processes_here(dist.new_group([dist.get_rank()], use_local_synchronization=True))
        return bring_copies(memory, Run.open(run.path), processes, hosts_of(processes))

    first, *others = pool(3).run(case)
    assert all(other == first for other in others)
    return first[0], first[1]


def steps(run: Run) -> list[str]:
    return [path.name for path in list_checkpoints(run.checkpoints)]


def test_what_two_of_three_hosts_have_is_brought_to_the_disk(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    left()
    shutil.rmtree(tmp_path / "1")
    brought, wrong = bring(pool, run, tmp_path)
    assert brought.startswith("step-00000200 came to the disk from the memory of ") and wrong == []
    assert steps(run) == ["step-00000200"]
    known = [read_record(tmp_path / str(number)) for number in range(3)]
    assert known == [Record(run.path.resolve(), ("2",))] * 3
    run.begin_attempt()
    assert bring(pool, run, tmp_path) == ("", []), "the disk has it"


def test_hosts_that_have_no_directory_hear_of_what_the_others_have(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    left()
    shutil.rmtree(tmp_path / "0")
    brought, wrong = bring(pool, run, tmp_path, without=(0,))
    assert brought.startswith("step-00000200 came to the disk from the memory of ") and wrong == []
    assert steps(run) == ["step-00000200"] and last_to_go_on(run) == 2 and not (tmp_path / "0").exists()


def test_what_one_of_three_hosts_has_is_not_whole_and_that_is_said(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    left()
    for number in (0, 2):
        shutil.rmtree(tmp_path / str(number))
    brought, (line,) = bring(pool, run, tmp_path)
    assert brought == "" and steps(run) == []
    assert line == (
        "step-00000200 in the memory of hosts is not whole: 2 of its 3 files are on the hosts that are here"
    )
    assert list(tmp_path.glob("[012]/step-*")) == []


def test_where_a_host_was_lost_during_a_save_the_one_before_counts_that_all_have(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    """The first host has named its part of the next one, and kept the one before; the last had not come so far."""
    left()
    for number in (0, 2):
        shutil.copytree(tmp_path / str(number) / "step-00000200", tmp_path / f"before-{number}")
    made = header(300, run=run.id, generation=1)
    pool(3).run(lambda: save_here(tmp_path, HOSTS, 300, header=made).step)
    for number in (0, 2):
        (tmp_path / f"before-{number}").rename(tmp_path / str(number) / "step-00000200")
    shutil.rmtree(tmp_path / "2" / "step-00000300")
    shutil.rmtree(tmp_path / "1")
    brought, (line,) = bring(pool, run, tmp_path)
    assert brought.startswith("step-00000200 came to the disk from the memory of ") and steps(run) == ["step-00000200"]
    assert line.startswith("step-00000300 in the memory of hosts is not whole: 2 of its 3 files ")


@pytest.mark.parametrize("what", ["newer on the disk", "one went on between", "distrusted", "no record"])
def test_what_does_not_count_is_not_brought(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None], what: str
) -> None:
    left()
    if what == "newer on the disk":
        save_alone(run.checkpoints, header=header(100, run=run.id, generation=run.attempts))
    if what == "one went on between":
        note_going_on(run)
        run.begin_attempt()
    if what == "distrusted":
        distrust(run.checkpoints)
    if what == "no record":
        for number in range(3):
            (tmp_path / str(number) / "record.json").unlink()
    before = steps(run)
    assert bring(pool, run, tmp_path) == ("", []) and steps(run) == before
    assert list(tmp_path.glob("[012]/step-*")) == [], "nor will it be later, and it takes memory"
    assert not is_distrusted(run.checkpoints), "what comes now is another attempt's"


def test_an_attempt_that_dies_before_it_has_looked_costs_no_copy(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    left()
    run.begin_attempt()
    brought, wrong = bring(pool, run, tmp_path)
    assert brought.startswith("step-00000200 came to the disk") and wrong == [] and steps(run) == ["step-00000200"]
    assert last_to_go_on(run) == run.attempts == 3


@pytest.mark.parametrize("where", ["before it goes on", "after that"])
def test_nor_does_one_that_dies_while_it_looks(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None], where: str
) -> None:
    left()

    def case() -> bool:
        """Every rank dies after the same call."""
        processes = processes_here(dist.new_group([dist.get_rank()], use_local_synchronization=True))
        hosts, calls, dies = hosts_of(processes), list[int](), 2 if where == "before it goes on" else 3

        def counted(call: Any) -> Any:
            def do(*args: Any) -> Any:
                found = call(*args)
                calls.append(1)
                if len(calls) == dies:
                    raise InterruptedError
                return found

            return do

        with pytest.MonkeyPatch.context() as patch:
            if where == "before it goes on":
                patch.setattr(peer_copies, "everyones", counted(everyones))
            else:
                patch.setattr(Processes, "share", counted(Processes.share))
            try:
                bring_copies(tmp_path / str(dist.get_rank()), Run.open(run.path), processes, hosts)
            except InterruptedError:
                return True
        return False

    assert pool(3).run(case) == [True] * 3
    assert last_to_go_on(run) == (1 if where == "before it goes on" else 2)
    shutil.rmtree(run.checkpoints)  # as if the disk had lost what had come there
    run.checkpoints.mkdir()
    run.begin_attempt()
    brought, _ = bring(pool, run, tmp_path)
    assert brought.startswith("step-00000200 came to the disk") and steps(run) == ["step-00000200"]


def test_what_a_guard_has_found_wrong_does_not_count_later_either(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    left()
    distrust(run.checkpoints)
    run.begin_attempt()  # the one before has died early
    assert bring(pool, run, tmp_path) == ("", []) and steps(run) == []


def test_every_host_is_made_to_see_what_came_to_the_disk(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    """Whoever commits it: another's file system may remember that it was not there."""
    left()

    def case() -> list[str]:
        seen = list[str]()
        processes = processes_here(dist.new_group([dist.get_rank()], use_local_synchronization=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_copies, "await_name", lambda path, *seconds: seen.append(path.name))
            bring_copies(tmp_path / str(dist.get_rank()), Run.open(run.path), processes, hosts_of(processes))
        return seen

    assert [set(seen) for seen in pool(3).run(case)] == [{"step-00000200"}] * 3


def test_a_file_that_is_damaged_in_both_places_is_told_and_nothing_is_brought(
    pool: Pools, run: Run, tmp_path: Path, left: Callable[[], None]
) -> None:
    left()
    for path in tmp_path.glob("*/step-00000200/*rank-00001.safetensors"):
        flip(path, 4000)
    brought, wrong = bring(pool, run, tmp_path)
    assert brought == "" and steps(run) == [] and len(wrong) == 2
    assert all("rank-00001.safetensors" in line and "SHA-256" in line for line in wrong)
    assert len(list(tmp_path.glob("[012]/step-*"))) == 3, "until another one takes its place"


def test_who_is_beside_whom(pool: Pools) -> None:
    def case() -> tuple[tuple[int, ...], ...]:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
        return hosts_of(processes_here(groups[dist.get_rank() % 2])).members

    assert pool(3).run(case) == [((0, 2), (1,))] * 3
