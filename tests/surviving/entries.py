"""What the workers of these tests do; named "tests.surviving.entries:NAME", so that the agent imports none of it."""

import os
import re
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from allranks.errors import TaskError
from allranks.observing import heartbeat
from allranks.training.stop import StopRequests


def _rank() -> int:
    return int(os.environ["RANK"])


def done() -> None:
    """End well."""


def code(number: int, rank: int) -> int:
    """One rank returns a code, the others 0."""
    return number if _rank() == rank else 0


def end_while_writing(folder: str) -> None:
    """As where the heart's thread was asked for its collectives when the process ended."""
    Path(folder, f"rank-{_rank():05d}.collectives.{os.getpid()}.tmp").touch()


def tell_environment(folder: str) -> None:
    """Write down what a worker finds."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "EXTRA")
    lines = [f"{name}={os.environ.get(name, '')}" for name in names] + [f"cwd={Path.cwd()}", f"argv={len(sys.argv)}"]
    lines.append(f"held={signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])}")
    Path(folder, str(_rank())).write_text("\n".join(lines))


def fail_in_turn(first: int, how: str) -> None:
    """Rank `first` fails; the others then say what torch says when a peer has gone."""
    if _rank() == first:
        if how == "raise":
            deep_in_user_code()
        if how == "refuse":
            raise TaskError("no Task file: there is no digits.py here")
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(0.3)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5000")


def abort_as_nccl_does(folder: str) -> None:
    """Rank 1's watchdog ends it; rank 0 has gone without a word, which is why."""
    if _rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with Path(folder, "rank-00001.log").open("a", encoding="utf-8") as log:
        log.write("watchdog thread terminated with exception: NCCL error: remote process exited\n")
    os.abort()


def deep_in_user_code() -> None:
    """Raise."""
    raise ValueError("the user's own mistake")


def lose_peer_first() -> None:
    """Rank 1 sees the loss of its peer before rank 0 has said why it fails."""
    if _rank() == 1:
        raise RuntimeError("Connection closed by peer")
    time.sleep(0.5)
    raise ValueError("the cause, later by the clock")


def hang_beside_failure() -> None:
    """Rank 0 fails, rank 1 would never end."""
    if _rank() == 0:
        raise ValueError("rank 0 fails")
    time.sleep(600)


def train(folder: str, seconds_to_save: float) -> int:
    """Like a worker that trains: stops at a step boundary, saves, and ends with the code of the request."""
    stops = StopRequests.install()
    Path(folder, f"started-{_rank()}").write_text(str(os.getpid()))
    while stops.requested() is None:
        time.sleep(0.02)
    time.sleep(seconds_to_save * _rank())
    Path(folder, f"saved-{_rank()}").touch()
    return 130 if stops.requested() == "SIGINT" else 75


def never_mind(folder: str) -> None:
    """Train on whatever is asked."""
    StopRequests.install()
    Path(folder, f"started-{_rank()}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


def restart(folder: str) -> None:
    """Fail on rank 1 until the third attempt."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(folder, f"{attempt}-{_rank()}").write_text(os.environ["MASTER_PORT"])
    if attempt != "2" and _rank() == 1:
        raise ValueError(f"attempt {attempt}")


def refuse(folder: str) -> None:
    """Refuse, and count how often."""
    Path(folder, f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{_rank()}").touch()
    raise TaskError("no Task file: there is no digits.py here")


def meet(folder: str) -> None:
    """Use the agent's store: every rank adds, and waits for all."""
    from allranks.launching.environment import read_environment
    from allranks.parallel.store import open_store

    environment = read_environment(os.environ)
    store = open_store(environment, connect_seconds=20, timeout_seconds=20)
    store.add("present", 1)
    while store.add("present", 0) < environment.world_size:
        time.sleep(0.01)
    Path(folder, f"met-{environment.rank}").touch()


def reply(size: int, pipe: Connection) -> int:
    """Send the rank, many times, and end with it as the code."""
    pipe.send_bytes(str(_rank()).encode() * size)
    return _rank()


def steps(folder: str, fault: str, at_attempts: int = 1) -> int:
    """Like a worker that trains 60 steps of a hundredth of a second; rank 1 meets a fault in its 8th, at first."""
    heart, attempt = heartbeat.current(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(folder, f"{attempt}-{_rank()}").write_text(str(os.getpid()))
    for step in range(60):
        heart.begin_step()
        time.sleep(0.01)
        if step == 7 and _rank() == 1 and attempt < at_attempts:
            while not Path(folder, f"passed.{attempt}").exists():  # no collective holds them together
                heart.progress()
                time.sleep(0.01)
            meet_fault(fault)
        heart.finish_step(step + 1)
        if step == 7 and _rank() == 0:
            Path(folder, f"passed.{attempt}").touch()
    heart.enter("end")
    return 0


def leave(folder: str, fault: str, at_attempts: int = 1) -> int:
    """Rank 1 leaves after its 7th step, by `fault`; its peer sees that its connection has ended."""
    left = Path(folder, "left")
    Path(folder, f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{_rank()}").touch()
    heartbeat.current().finish_step(7)
    if _rank() == 1:
        left.touch()
        sys.exit(0) if fault == "sys.exit" else os._exit(int(fault))
    while not left.exists():
        time.sleep(0.01)
    raise RuntimeError("Connection closed by peer")


def leave_silently(rank: int) -> None:
    """Make three steps; one rank ends with 0 before it returns."""
    heartbeat.current().finish_step(3)
    if _rank() == rank:
        os._exit(0)


def meet_fault(fault: str) -> None:
    """What a hang or crash is made of."""
    if fault == "hang":
        time.sleep(600)
    if fault == "data":
        with heartbeat.current().loading():
            time.sleep(600)
    if fault == "slow data":
        with heartbeat.current().loading():
            time.sleep(4.0)
    if fault == "slow save":
        heartbeat.current().enter("checkpoint")
        time.sleep(4.0)
        heartbeat.current().enter("step")
    if fault == "evaluation":
        heartbeat.current().enter("evaluation")
        time.sleep(4.0)
    if fault == "lock":
        re.match(r"(a?){40}a{40}", "a" * 40)
    if fault == "server":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)  # its own end follows
    if fault in ("SIGSTOP", "SIGKILL", "SIGSEGV"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "raise":
        raise ValueError("the user's own mistake")
