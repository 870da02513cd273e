"""A host joins a run and is lost again: ours beside torchrun with torch.distributed.checkpoint.

    python bench/hosts.py [--turns 5] [--way allranks] [--quick] [--json]

Two commands on this machine are two hosts with one worker each, `--nodes 1:2` on both sides, the endpoint at the first
one. Each turn is a run of its own. `joins` are the seconds from the start of the second command, beside a run that goes
on, until rank 0 has finished a step together with it (the interpreter and torch included); `losses` those from the
SIGKILL to all its processes until rank 0 has finished a step without it. Counted are those after which a step came
within two minutes.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from recovering_runs import Program, Watched, add_way, end

PATIENCE_SECONDS = 120.0
START_SECONDS = 180.0
STEPS_BETWEEN = 10
PROGRAM = Program(nproc=1, save_every=5, pause=0.05, restarts=1000)
COLUMNS = ("way", "turns", "joins", "median", "worst", "losses", "median", "worst")


@dataclass
class Hosts:
    """The commands of one run, the first of which leads."""

    watched: Watched
    port: int
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """One more."""
        self.commands.append(start_host(self.watched.way, self.watched.folder, self.port))


def start_host(way: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
    """One host's command."""
    endpoint = f"127.0.0.1:{port}"
    command = PROGRAM.command(way, folder)
    if way == "torchrun":
        meet = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=run"]
        place = command.index("--standalone")
        command[place : place + 1] = meet
    else:
        command += ["--nodes", "1:2", "--rendezvous", f"c10d://{endpoint}"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ALLRANKS_SECRET": "0" * 32}
    silent = subprocess.DEVNULL
    return subprocess.Popen(command, env=environ, stdout=silent, stderr=silent, start_new_session=True)


def measure(way: str, turns: int) -> dict[str, object]:
    """One row."""
    joins = [seconds for _ in range(turns) if (seconds := measure_one(way, join)) is not None]
    losses = [seconds for _ in range(turns) if (seconds := measure_one(way, lose)) is not None]
    return {"way": way, "turns": turns, "joins": joins, "losses": losses}


def measure_one(way: str, meet: Callable[[Hosts], float | None]) -> float | None:
    """The seconds of one join or loss in a run of its own; None where no step came after it."""
    with tempfile.TemporaryDirectory() as name:
        hosts = Hosts(Watched(way, Path(name)), free_port())
        try:
            hosts.start()
            return meet(hosts)
        finally:
            for command in hosts.commands:
                end(command, hosts.watched)


def join(hosts: Hosts) -> float | None:
    """A second host comes to a run that goes on."""
    if not hosts.watched.wait(set(), STEPS_BETWEEN, START_SECONDS):
        return None
    before, began = hosts.watched.processes, time.time()
    hosts.start()
    together = hosts.watched.wait(before, 1, PATIENCE_SECONDS)
    return together[0].at - began if together and 1 in hosts.watched.pids else None


def lose(hosts: Hosts) -> float | None:
    """The second of two goes."""
    deadline = time.monotonic() + START_SECONDS
    while not listens(hosts.port) and time.monotonic() < deadline:
        time.sleep(0.02)  # whoever comes first leads: the one that stays
    hosts.start()
    while 1 not in hosts.watched.pids and time.monotonic() < deadline:
        hosts.watched.look()
        time.sleep(0.02)
    before = hosts.watched.processes - {str(hosts.watched.pids.get(0))}
    if not hosts.watched.wait(before, STEPS_BETWEEN, PATIENCE_SECONDS):
        return None
    before, killed = hosts.watched.processes, time.time()
    kill_host(hosts.commands[1])
    alone = hosts.watched.wait(before, 1, PATIENCE_SECONDS)
    return alone[0].at - killed if alone else None


def kill_host(command: subprocess.Popen[bytes]) -> None:
    """SIGKILL to all its processes at once; the kernel closes their connections."""
    children: list[int] = []
    with suppress(psutil.NoSuchProcess):
        children = [child.pid for child in psutil.Process(command.pid).children(recursive=True)]
    for pid in (command.pid, *children):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.wait()


def listens(port: int) -> bool:
    """Whether somebody listens on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port of loopback that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cells(row: dict[str, Any]) -> list[str]:
    """A row as it is printed."""
    found = [row["way"], str(row["turns"])]
    for name in ("joins", "losses"):
        seconds = row[name]
        found.append(str(len(seconds)))
        found += [f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["-", "-"]
    return found


def main() -> None:
    """Measure both ways and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one turn")
    add_way(parser)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    rows = [measure(way, 1 if chosen.quick else chosen.turns) for way in chosen.way]
    if chosen.json:
        print(json.dumps({"rows": rows}))
        return
    for names in [list(COLUMNS), *map(cells, rows)]:
        print("  ".join(f"{name:>8}" for name in names))


if __name__ == "__main__":
    main()
