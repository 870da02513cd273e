"""Two hosts of which one, or the network between them, fails: ours beside torchrun with torch.distributed.checkpoint.

    python bench/network.py [--way allranks] [--fault lost hiccup] [--turns 3] [--patience 120] [--quick] [--json]
                            [--save FILE]

A host is a set of Linux namespaces with an address and processes of its own (the laboratory of
tests/cli/test_running_on_a_network.py): root is needed. One worker each, the same tiny model under DDP, `--nodes 1:2`
and `--nnodes=1:2`, the endpoint at the first host, and the second one is struck. Each turn is a run of its own.

    lost        its processes are killed, and its kernel closes their connections
    power off   nothing of it runs any more, and nothing is heard of it
    partition   it runs on, and no packet comes through any more
    freeze      all of its processes are stopped (SIGSTOP), and stay so
    hiccup      no packet comes through for ten seconds
    join        it comes to a run that goes on

`seconds` are those from there to the first finished step of rank 0 behind the longest silence; a turn without such a
step within the patience is not recovered. `restarts`: in how many of the turns rank 0 was another process afterwards,
`steps lost`: how many finished steps were made again, at most.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from recovering_runs import Program, Step, Watched, add_way

from tests.cli.test_running_on_a_network import CUT, DEVICE, PORT, Laboratory, Machine, around, what_is_missing

PATIENCE_SECONDS = 120.0
START_SECONDS = 600.0  # a net
STEPS_BETWEEN = 10
STEPS_AFTER = 5
HICCUP_SECONDS = 10.0
SETTLED_SECONDS = 1.0
"""After a fault: what finishes later has not been on its way when it struck."""
PROGRAM = Program(nproc=1, save_every=5, pause=0.05, restarts=1000)
ENDPOINT = f"10.77.0.1:{PORT}"
COLUMNS = ("way", "fault", "turns", "recovered", "median", "worst", "restarts", "steps lost")


def lose(laboratory: Laboratory, second: Machine) -> None:
    """All but its first process, which is stopped and keeps the namespaces: the kernel says goodbye for the others."""
    second.freeze()  # else the launcher sees its worker die, and says so
    for process in second.processes()[1:]:
        process.kill()


def power_off(laboratory: Laboratory, second: Machine) -> None:
    """Silence first."""
    laboratory.wire.rule = around(second, CUT)
    second.power_off()


def part(laboratory: Laboratory, second: Machine) -> None:
    """For good."""
    laboratory.wire.rule = around(second, CUT)


def freeze(laboratory: Laboratory, second: Machine) -> None:
    """For good."""
    second.freeze()


def hiccup(laboratory: Laboratory, second: Machine) -> None:
    """And then all is as before."""
    before, laboratory.wire.rule = laboratory.wire.rule, around(second, CUT)
    time.sleep(HICCUP_SECONDS)
    laboratory.wire.rule = before


FAULTS: dict[str, Callable[[Laboratory, Machine], None]] = {
    "lost": lose,
    "power off": power_off,
    "partition": part,
    "freeze": freeze,
    "hiccup": hiccup,
}
JOIN = "join"


def command(way: str, folder: Path, number: int) -> list[str]:
    """What one host runs, where hosts know each other by name, which torchrun wants; `number`: which, from 1."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 hosta\n10.77.0.2 hostb\n", encoding="utf-8")
    words = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(folder / "hosts")]
    words += PROGRAM.command(way, folder)
    if way == "torchrun":
        meet = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={ENDPOINT}", "--rdzv-id=run"]
        place = words.index("--standalone")
        words[place : place + 1] = [*meet, f"--local-addr=10.77.0.{number}"]
        return ["env", f"GLOO_SOCKET_IFNAME={DEVICE}", *words]
    return [*words, "--nodes", "1:2", "--rendezvous", f"c10d://{ENDPOINT}"]


def recovery(steps: Sequence[Step], struck: float) -> tuple[float, bool, int] | None:
    """What followed, by rank 0's finished steps: seconds to the first one behind the longest silence, whether that was
    another process, and how many steps were made again; None: no step was finished any more.

    Args:
        struck: when, by the clock of the steps.
    """
    gaps = [(after.at - before.at, place) for place, (before, after) in enumerate(pairwise(steps)) if after.at > struck]
    if not gaps or steps[-1].at < struck + SETTLED_SECONDS:
        return None
    _, place = max(gaps)
    before, first = steps[place], steps[place + 1]
    furthest = max(step.number for step in steps[: place + 1])
    return first.at - struck, first.process != before.process, max(0, furthest - first.number + 1)


def measure_one(way: str, fault: str, patience: float) -> tuple[float, bool, int] | None:
    """One turn in a run of its own; as `recovery`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watched, laboratory = Watched(way, folder), Laboratory(folder)
        try:
            laboratory.start(*command(way, folder, 1))
            if fault == JOIN:
                if not watched.wait(set(), STEPS_BETWEEN, START_SECONDS):
                    raise SystemExit(f"{way} does not start alone:\n{laboratory.machines[0].said()[-2000:]}")
                struck = time.time()
                laboratory.start(*command(way, folder, 2))
                return _await(watched, struck, patience, both=True)
            second = laboratory.start(*command(way, folder, 2))
            _await_both(watched, laboratory)
            struck = time.time()
            FAULTS[fault](laboratory, second)
            return _await(watched, struck, patience, both=False)
        finally:
            laboratory.close()


def _await_both(watched: Watched, laboratory: Laboratory) -> None:
    """Some steps of the two together: the first may have begun alone."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and all(one.process.poll() is None for one in laboratory.machines):
        watched.look()
        if 1 in watched.pids:
            made = len(watched.steps)
            while len(watched.steps) < made + STEPS_BETWEEN and time.monotonic() < deadline:
                time.sleep(0.02)
                watched.look()
            return
        time.sleep(0.02)
    said = "\n".join(one.said()[-2000:] for one in laboratory.machines)
    raise SystemExit(f"{watched.way}: the two hosts do not come together:\n{said}")


def _await(watched: Watched, struck: float, patience: float, *, both: bool) -> tuple[float, bool, int] | None:
    """Until some steps have followed, of `both` where that is wanted; None: not within the patience."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        watched.look()
        together = not both or 1 in watched.pids
        found = recovery(watched.steps, struck) if together else None
        if found is not None:
            ended = struck + found[0]
            if sum(step.at >= max(ended, struck + SETTLED_SECONDS) for step in watched.steps) >= STEPS_AFTER:
                return found
        time.sleep(0.02)
    return None


def measure(way: str, fault: str, turns: int, patience: float) -> dict[str, Any]:
    """One row."""
    found = [one for _ in range(turns) if (one := measure_one(way, fault, patience)) is not None]
    return {
        "way": way,
        "fault": fault,
        "turns": turns,
        "seconds": [round(seconds, 2) for seconds, _, _ in found],
        "restarts": sum(again for _, again, _ in found),
        "steps_lost": max((lost for *_, lost in found), default=0),
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row as it is printed."""
    seconds = row["seconds"]
    times = [f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["-", "-"]
    found = [row["way"], row["fault"], str(row["turns"]), str(len(seconds)), *times]
    return [*found, str(row["restarts"]) if seconds else "-", str(row["steps_lost"]) if seconds else "-"]


def document(rows: list[dict[str, Any]], patience: float) -> dict[str, Any]:
    """All rows, and where they were measured."""
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {
        "command": f"python bench/network.py --patience {patience:g}",
        "date": date,
        "machine": machine,
        "rows": rows,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--fault", nargs="+", choices=(*FAULTS, JOIN), default=(*FAULTS, JOIN), help="all, unless named"
    )
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds after which a turn is over")
    parser.add_argument("--quick", action="store_true", help="one turn of ours, a host that is lost")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the document after each row")
    add_way(parser)
    chosen = parser.parse_args()
    if missing := what_is_missing():
        raise SystemExit(f"bench/network.py: {missing}")
    ways, faults, turns = (("allranks",), ("lost",), 1) if chosen.quick else (chosen.way, chosen.fault, chosen.turns)
    rows: list[dict[str, Any]] = []
    if not chosen.json:
        print("  ".join(f"{name:>10}" for name in COLUMNS))
    for fault in faults:
        for way in ways:
            rows.append(measure(way, fault, turns, chosen.patience))
            if not chosen.json:
                print("  ".join(f"{name:>10}" for name in cells(rows[-1])), flush=True)
            if chosen.save is not None:
                chosen.save.write_text(json.dumps(document(rows, chosen.patience), indent=1) + "\n", encoding="utf-8")
    if chosen.json:
        print(json.dumps(document(rows, chosen.patience)))


if __name__ == "__main__":
    main()
