"""The mirror in a real S3 server, in a process of its own: its pages, its parts, its errors, and a line that is cut."""

import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, verify_files
from allranks.checkpointing.mirror import Mirror
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import SHAPES, save_alone
from tests.s3_server import BUCKET, PAGE, S3Server, client, line, needs_s3, s3_server

RUN = "run-a"
URL = f"s3://{BUCKET}/mine"

pytestmark = needs_s3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One for all tests here; each has a bucket of its own."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def mirror(server: S3Server, request: pytest.FixtureRequest) -> Mirror:
    """In a bucket of this test's."""
    bucket = f"bucket-{zlib.crc32(request.node.name.encode())}"
    server.files.mkdir(bucket)
    return reach(server.port, f"s3://{bucket}/mine")


CLIENTS = dict[int, Any]()


def reach(port: int, url: str = URL, **more: Any) -> Mirror:
    """The mirror by way of this port; where that does not answer it is asked for seconds, not for minutes."""
    if port not in CLIENTS:
        CLIENTS[port] = client(port, config_kwargs={"retries": {"max_attempts": 1}})
        CLIENTS[port].retries = 1
    mirror = Mirror(url, RUN, **more)
    mirror._files = CLIENTS[port]
    return mirror


def files_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.path.iterdir()}


def steps_in(mirror: Mirror) -> list[int]:
    return [one.step for one in mirror.list_newest()]


def test_what_was_brought_comes_back_and_what_is_too_old_goes(mirror: Mirror, server: S3Server, tmp_path: Path) -> None:
    sent = [save_alone(tmp_path / "a", step) for step in (100, 200, 300, 400)]
    for checkpoint in sent:
        mirror.bring(checkpoint)
        mirror.prune(2, keep_every=100 if checkpoint.step == 100 else None)
    assert steps_in(mirror) == steps_in(reach(server.port, mirror.url)) == [400, 300]
    assert len(server.files.find(mirror._root)) == 2 * len(files_of(sent[0])), "nothing is left of the others"
    fetched = mirror.fetch(mirror.list_newest()[0], tmp_path / "b", RUN)
    assert files_of(fetched) == files_of(sent[3])
    verify_files(fetched)


@pytest.mark.parametrize("pages", [2, pytest.param(105, marks=pytest.mark.full)])
def test_a_folder_of_many_pages_is_read_to_its_end(
    mirror: Mirror, server: S3Server, tmp_path: Path, pages: int
) -> None:
    """105: more than the thousand that S3 itself lists at a time."""
    server.files.pipe({f"{mirror._root}/another-{n:08d}": b"x" for n in range(pages * PAGE)})
    mirror.bring(save_alone(tmp_path / "a", 100))
    assert len(server.files.ls(mirror._root)) == pages * PAGE + 1 and steps_in(mirror) == [100]
    mirror.bring(save_alone(tmp_path / "a", 200))
    mirror.prune(1)
    assert steps_in(mirror) == [200]


PART = 5 << 20  # the smallest that S3 takes


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """With a file that goes in three parts, as one above 100 MB does of itself."""
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda size, chunksize=None: chunksize or PART)
    monkeypatch.setitem(SHAPES, "model.large", (2 * PART // 4 + 1,))
    return save_alone(tmp_path / "a", 200)


def test_a_large_file_goes_in_parts_and_tells_of_them(mirror: Mirror, large: Checkpoint, tmp_path: Path) -> None:
    told = list[int]()
    mirror.bring(large, lambda: told.append(1))
    few = len(told) - 2 * len(files_of(large))
    (found,) = mirror.list_newest()
    assert few >= 2, "each part"
    told.clear()
    fetched = mirror.fetch(found, tmp_path / "b", RUN, lambda: told.append(1))
    assert files_of(fetched) == files_of(large) and len(told) > 2 * len(files_of(large)) + 2


def test_a_line_that_is_cut_in_the_middle_leaves_nothing_that_counts(
    mirror: Mirror, server: S3Server, large: Checkpoint, tmp_path: Path
) -> None:
    first = save_alone(tmp_path / "c", 100)
    mirror.bring(first)
    with line(server.port) as cable:
        far = reach(cable.port, mirror.url)
        for share in (0.0, 0.3, 0.7, 0.99):
            cable.cut_at = cable.sent + int(share * large.num_bytes) + 1
            with pytest.raises(CheckpointError, match=r"cannot be written: \w+: ") as told:
                far.bring(large)
            assert "\n" not in str(told.value) and steps_in(mirror) == [100]
            fetched = mirror.fetch(mirror.list_newest()[0], tmp_path / "b", RUN)
            assert files_of(fetched) == files_of(first)
        cable.cut_at = None
        far.bring(large)
        far.prune(1)
    assert steps_in(mirror) == [200]
    assert files_of(mirror.fetch(mirror.list_newest()[0], tmp_path / "b", RUN)) == files_of(large)


def test_a_line_that_is_cut_on_the_way_back_leaves_nothing_here(
    mirror: Mirror, server: S3Server, large: Checkpoint, tmp_path: Path
) -> None:
    mirror.bring(large)
    with line(server.port) as cable:
        far = reach(cable.port, mirror.url)
        (found,) = far.list_newest()

        def cut() -> None:
            cable.cut_at = 0
            cable.cut()

        with pytest.raises(CheckpointError, match="cannot be read: "):
            far.fetch(found, tmp_path / "b", RUN, cut)
        assert list((tmp_path / "b").iterdir()) == []
        cable.cut_at = None
        assert files_of(far.fetch(found, tmp_path / "b", RUN)) == files_of(large)


def test_a_line_on_which_nothing_moves_is_left_after_a_while(
    mirror: Mirror, server: S3Server, large: Checkpoint, tmp_path: Path
) -> None:
    with line(server.port) as cable:
        far = reach(cable.port, mirror.url, patience=2.0)
        cable.holds = True
        with pytest.raises(CheckpointError, match="cannot be written: TimeoutError: nothing has come further there"):
            far.bring(large)
        with pytest.raises(CheckpointError, match="cannot be listed: TimeoutError: nothing has come further there"):
            far.list_newest()
        cable.holds = False
        near = reach(cable.port, mirror.url)
        near.bring(large)
        assert steps_in(mirror) == [200]


@pytest.mark.full
def test_a_server_that_is_killed_has_lost_all_and_is_filled_again(tmp_path: Path) -> None:
    with s3_server(tmp_path) as server:
        mirror = reach(server.port)
        mirror.bring(save_alone(tmp_path / "a", 100))
        server.signal(signal.SIGKILL)
        with pytest.raises(
            CheckpointError, match=r"cannot be written: EndpointConnectionError: Could not connect"
        ) as e:
            mirror.bring(save_alone(tmp_path / "a", 200))
        assert "\n" not in str(e.value)
        server.start()
        with pytest.raises(CheckpointError, match=r"cannot be written: FileNotFoundError: .*bucket does not exist"):
            mirror.bring(save_alone(tmp_path / "a", 300))
        assert server.files.ls("") == [], "nobody has made a bucket"
        server.files.mkdir(BUCKET)
        mirror.bring(save_alone(tmp_path / "a", 400))
        assert steps_in(mirror) == [400]


def test_who_is_not_known_there_is_told_so_in_one_line(mirror: Mirror, server: S3Server, tmp_path: Path) -> None:
    sent = save_alone(tmp_path / "a", 100)
    mirror.bring(sent)
    server.refuse_everybody()
    calls: list[Callable[[], object]] = [
        mirror.list_newest,
        mirror.is_there,
        lambda: mirror.bring(save_alone(tmp_path / "a", 200)),
        lambda: mirror.prune(1),
    ]
    try:
        for call in calls:
            with pytest.raises(CheckpointError, match=r"cannot be \w+: PermissionError: ") as told:
                call()
            assert "\n" not in str(told.value)
    finally:
        server.refuse_everybody(-1)
    assert steps_in(mirror) == [100]
