import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks import fault_points
from allranks.fault_points import EXIT_CODE, KINDS, POINTS, VARIABLE, Fault, Kind

SOURCE = Path(fault_points.__file__).parent
WALK = """
import sys
from allranks import fault_points
fault_points.join({fault_points.VARIABLE: sys.argv[1]}, int(sys.argv[2]))
fault_points.reach("start")
for step in range(int(sys.argv[3]) + 1, 6):
    fault_points.begin_step(step)
    for visit in (1, 2):
        print(step, visit, flush=True)
        fault_points.reach("forward")
"""


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    yield
    fault_points.join({}, 0)


def fault(**fields: object) -> Fault:
    return Fault(**{"number": 0, "point": "forward", "rank": 0, "step": 3, "visit": 2, "kind": "kill", **fields})  # type: ignore[arg-type]


def walk(folder: Path, rank: int = 0, done: int = 0) -> tuple[int, str]:
    """A program that passes `forward` twice a step, from step `done` on: how it ends, and what it passed last."""
    command = [sys.executable, "-c", WALK, str(folder), str(rank), str(done)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, (ran.stdout.splitlines() or [""])[-1]


def test_every_point_is_named_once_in_the_program_and_none_besides() -> None:
    named = [
        line.split('reach("')[1].split('"')[0]
        for path in SOURCE.rglob("*.py")
        if path.name != "fault_points.py"
        for line in path.read_text().splitlines()
        if 'fault_points.reach("' in line
    ]
    assert set(named) == set(POINTS)


def test_a_point_does_nothing_unless_chaos_asks(tmp_path: Path) -> None:
    fault_points.write_schedule(tmp_path, [fault(kind="raise", step=0, visit=1)])
    fault_points.join({}, 0)
    fault_points.reach("forward")
    fault_points.join({VARIABLE: str(tmp_path)}, 0)
    with pytest.raises(RuntimeError, match="fault 0, at forward of rank 0"):
        fault_points.reach("forward")


def test_a_fault_strikes_its_rank_in_its_step_once_over_all_starts(tmp_path: Path) -> None:
    fault_points.write_schedule(tmp_path, [fault()])
    assert walk(tmp_path, rank=1) == (0, "5 2")
    assert walk(tmp_path) == (-signal.SIGKILL, "3 2")
    fired = fault_points.read_fired(tmp_path)
    assert list(fired) == [0] and fired[0].step == 3
    assert walk(tmp_path) == (0, "5 2")


def test_who_is_killed_while_it_writes_the_mark_leaves_none(tmp_path: Path) -> None:
    """By the agent, because another rank met its own fault a moment before: what is left is no mark of half a word."""
    killed_at_the_end_of_a_file = """
import os
def kill_instead(event, args):
    if event in ("os.link", "os.rename"):
        os.kill(os.getpid(), 9)
import json
json.dump = lambda *args: os.kill(os.getpid(), 9)
sys.addaudithook(kill_instead)
"""
    fault_points.write_schedule(tmp_path, [fault(kind="exit")])
    words = [sys.executable, "-c", f"import sys{killed_at_the_end_of_a_file}{WALK}", str(tmp_path), "0", "0"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert fault_points.read_fired(tmp_path) == {}
    assert walk(tmp_path) == (EXIT_CODE, "3 2")
    assert list(fault_points.read_fired(tmp_path)) == [0]
    assert sorted(path.name for path in tmp_path.glob("fired-*")) == ["fired-0.json"]


def test_what_was_missed_strikes_at_the_next_passing(tmp_path: Path) -> None:
    fault_points.write_schedule(tmp_path, [fault()])
    assert walk(tmp_path, done=3) == (-signal.SIGKILL, "4 1")


def test_a_fault_in_a_recovery_waits_for_the_fault_before(tmp_path: Path) -> None:
    fault_points.write_schedule(tmp_path, [fault(), fault(number=1, point="start", after=0)])
    assert walk(tmp_path)[1] == "3 2"
    assert walk(tmp_path) == (-signal.SIGKILL, "")
    assert walk(tmp_path) == (0, "5 2")


@pytest.mark.parametrize(
    ("kind", "code"),
    [("segfault", -signal.SIGSEGV), ("exit", EXIT_CODE), ("raise", 1), ("enospc", 1), ("eio", 1)],
)
def test_kinds(tmp_path: Path, kind: Kind, code: int) -> None:
    fault_points.write_schedule(tmp_path, [fault(kind=kind)])
    assert walk(tmp_path) == (code, "3 2")


def test_a_stop_stops_and_the_process_can_go_on(tmp_path: Path) -> None:
    fault_points.write_schedule(tmp_path, [fault(kind="stop")])
    with subprocess.Popen([sys.executable, "-c", WALK, str(tmp_path), "0", "0"], stdout=subprocess.PIPE) as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0


def test_a_process_that_is_cut_off_goes_on_and_both_ends_of_its_connections_learn_of_it() -> None:
    near, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, near, far:
        with socket.create_connection(listener.getsockname()) as here, listener.accept()[0] as there:
            here.sendall(b"before")
            fault_points.break_here(fault(kind="disconnect"))
            assert there.recv(10) == b"before" and there.recv(10) == here.recv(10) == b""
            with pytest.raises(BrokenPipeError):
                here.sendall(b"after")
        near.sendall(b"x")
        assert far.recv(1) == b"x", "of one machine's own nothing is cut"


def test_of_what_loads_data_a_process_is_killed_and_not_its_rank(tmp_path: Path) -> None:
    script = """
import multiprocessing, time
from allranks import fault_points
context = multiprocessing.get_context("fork")
loads = [context.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
for one in loads:
    one.start()
fault_points.break_here(fault_points.Fault(0, "data.worker", 0, 1, 1, "kill"))
youngest = max(loads, key=lambda one: one.pid)
youngest.join()
print([one.exitcode for one in loads if one is youngest], [one.is_alive() for one in loads if one is not youngest])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[-9] [True]\n"


def test_every_kind_is_tried_here() -> None:
    tried = {"kill", "stop", "segfault", "exit", "raise", "enospc", "eio", "disconnect"}
    assert set(KINDS) == tried


def test_an_undisturbed_run_writes_down_what_it_passes(tmp_path: Path) -> None:
    assert walk(tmp_path, rank=1) == (0, "5 2")
    assert fault_points.read_passed(tmp_path) == {1: {"start": {0: 1}, "forward": dict.fromkeys(range(1, 6), 2)}}


def test_a_thread_has_a_step_of_its_own(tmp_path: Path) -> None:
    """What is written beside the steps belongs to the step that it is of, not to the one that is made meanwhile."""
    beside = fault(kind="raise", point="checkpoint.write", step=2, visit=2)
    meanwhile = fault(kind="raise", point="backward", step=7, visit=1, number=1)
    fault_points.write_schedule(tmp_path, [beside, meanwhile])
    fault_points.join({VARIABLE: str(tmp_path)}, 0)
    fault_points.begin_step(7)
    fault_points.reach("forward")
    seen = list[str]()

    def write() -> None:
        fault_points.begin_step(2)
        fault_points.reach("checkpoint.write")
        seen.append("once")
        with pytest.raises(RuntimeError, match=r"at checkpoint\.write"):
            fault_points.reach("checkpoint.write")
        seen.append("twice")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert seen == ["once", "twice"] and fault_points.read_fired(tmp_path)[0].step == 2
    with pytest.raises(RuntimeError, match="at backward"):
        fault_points.reach("backward")
    assert fault_points.read_fired(tmp_path)[1].step == 7


def test_a_process_that_was_forked_off_is_no_rank(tmp_path: Path) -> None:
    fault_points.write_schedule(tmp_path, [fault(step=0, visit=1)])
    fault_points.join({VARIABLE: str(tmp_path)}, 0)
    in_fork: Callable[[], None] = lambda: fault_points.reach("forward")  # noqa: E731
    child = os.fork()
    if child == 0:
        in_fork()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert json.loads((tmp_path / "schedule.json").read_text())[0]["point"] == "forward"
    assert fault_points.read_fired(tmp_path) == {}
