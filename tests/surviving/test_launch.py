"""Functions in several processes, from a script, a closure, or no file at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import ConfigError, LayoutError, ProcessError
from allranks.surviving import forkserver
from allranks.surviving import launch as module
from allranks.surviving.by_value import dumps
from allranks.surviving.launch import RemoteTraceback, launch, launch_without_gpus
from tests.processes import is_gone, wait_until

pytestmark = pytest.mark.distributed
NO_FILE = """
import allranks
class Point:
    def __init__(self, x): self.x = x
base = 10
def work(step):
    import os
    return Point(base + step * int(os.environ["RANK"]))
points = allranks.launch(work, 5, nproc=2)
assert all(isinstance(point, Point) for point in points)
print([point.x for point in points])
"""


def rank() -> int:
    return int(os.environ["RANK"])


def test_closures_travel_and_values_come_back_by_rank() -> None:
    base = {"ten": 10}

    def work(step: int) -> Any:
        return base["ten"] + step * int(os.environ["RANK"]), lambda: os.environ["WORLD_SIZE"]

    found = launch(work, 5, nproc=3)
    assert [value for value, _ in found] == [10, 15, 20]
    assert callable(found[0][1])


def test_processes_meet_and_compute() -> None:
    def work() -> list[float]:
        import torch
        import torch.distributed as dist

        from allranks.launching.environment import read_environment
        from allranks.parallel.backend import choose_device, start, stop

        environment = read_environment(os.environ)
        start(environment, choose_device(environment, "cpu", "auto"), timeout_seconds=60)
        value = torch.full((2,), float(environment.rank + 1))
        dist.all_reduce(value)
        stop()
        return value.tolist()

    assert launch(work, nproc=2) == [[3.0, 3.0], [3.0, 3.0]]


def test_the_first_failing_ranks_error_is_raised_once() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("the user's own mistake")

    with pytest.raises(KeyError, match="own mistake") as caught:
        launch(work, nproc=2)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "rank 1 on " in str(cause)
    assert "in work" in str(cause)
    assert "src/allranks" not in str(cause)


@pytest.mark.parametrize("way", ["sys.exit()", "os._exit(0)", "os._exit(75)"])
def test_who_ends_before_the_function_returns_is_named(way: str) -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            sys.exit() if way == "sys.exit()" else os._exit(int(way[9:-1]))

    with pytest.raises(ProcessError, match=r"rank 1 on .*") as caught:
        launch(work, nproc=2)
    if way == "sys.exit()":
        assert "the user's code ended the process: sys.exit()" in str(caught.value)
        assert "in work" in str(caught.value.__cause__)
    else:
        assert f"exit code {way[9:-1]}, its work neither done nor saved" in str(caught.value)


def test_a_reply_that_is_no_value_is_never_returned() -> None:
    assert module._value(0, module.VALUE + dumps(3)) == 3
    for reply in (b"", module.ERROR + dumps(SystemExit(0))):
        with pytest.raises(ProcessError, match="rank 1 ended, and the function had not returned there"):
            module._value(1, reply)


def test_an_error_that_cannot_travel_is_told() -> None:
    def work() -> None:
        class Odd(Exception):
            def __init__(self) -> None:
                super().__init__("it is odd")
                self.lock = __import__("threading").Lock()

        raise Odd

    with pytest.raises(RuntimeError, match="Odd: it is odd") as caught:
        launch(work, nproc=1)
    assert "in work" in str(caught.value.__cause__)


def test_errors_of_allranks_keep_their_class() -> None:
    def work() -> None:
        raise LayoutError("dp_shard(3) = 3, but the world has 2 processes")

    with pytest.raises(LayoutError, match="dp_shard"):
        launch(work, nproc=2)


def test_a_killed_process_is_named() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        __import__("time").sleep(60)

    with pytest.raises(ProcessError, match=r"rank 1 on .* SIGKILL"):
        launch(work, nproc=2)


def test_the_layout_decides_how_many_and_reaches_the_processes() -> None:
    def work() -> tuple[str | None, str]:
        from allranks.launching.environment import read_environment

        return read_environment(os.environ).layout, os.environ["WORLD_SIZE"]

    assert launch(work, layout="dp_shard=2,dp_replicate=2") == [("dp_shard=2,dp_replicate=2", "4")] * 4
    with pytest.raises(LayoutError, match="3 processes"):
        launch(work, nproc=3, layout="dp_shard=2")


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="nproc=0"):
        launch(rank, nproc=0)


def test_not_inside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="already rank 1 of 2"):
        launch(rank, nproc=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["script", pytest.param("stdin", marks=pytest.mark.full)])
def test_a_program_without_a_main_guard_or_a_file(tmp_path: Path, way: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(NO_FILE)
    command = [sys.executable, str(script) if way == "script" else "-"]
    done = subprocess.run(
        command, input=NO_FILE, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout == "[10, 15]\n", done.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_ends_the_processes_and_reaches_the_caller(tmp_path: Path, background: bool) -> None:
    """Also where a shell has started the program in its background, and so with SIGINT ignored."""
    program = f"""
import allranks, os, signal, time
signal.signal(signal.SIGINT, signal.{"SIG_IGN" if background else "default_int_handler"})
def work():
    # A file that is closed where it is forgotten would swallow a Ctrl-C that comes meanwhile, as finalizers do.
    with open("{tmp_path}/" + os.environ["RANK"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
try:
    allranks.launch(work, nproc=2)
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: process.poll() is not None or len([one for one in tmp_path.iterdir() if one.read_text()]) == 2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60) == ("interrupted\n", "")
    assert all(is_gone(int(path.read_text())) for path in tmp_path.iterdir())


@pytest.mark.full
def test_without_gpus_none_is_seen_also_after_processes_that_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    server = forkserver._server

    def work() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def under() -> str | None:  # the variable under which the server has imported torch
        assert server.has is not None
        return dict(server.has.variables).get("CUDA_VISIBLE_DEVICES")

    for once, wanted in ((launch, "0,1"), (launch_without_gpus, ""), (launch, "0,1")):
        assert once(work, nproc=1) == [wanted]
        assert sys.platform != "linux" or under() == wanted
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
