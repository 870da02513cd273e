"""From the kill of a worker to the next finished step: ours beside torchrun with torch.distributed.checkpoint.

    python bench/recovery.py [--nproc 2] [--kills 100] [--way allranks] [--quick] [--json]

A tiny model under DDP saves every five steps. Again and again a worker (each rank in turn) gets SIGKILL at a random
moment, at least three steps after the recovery before; the seconds are those from the kill until rank 0 has finished a
step of the attempt after it. A kill after which no step comes within a minute is not recovered: the command is ended
and another one started, ten times at most.
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from recovering_runs import Program, Watched, add_way, end

PATIENCE_SECONDS = 60.0
START_SECONDS = 180.0
STEPS_BETWEEN = 3
MOST_LOST = 10  # kills that were not recovered: then a way ends
SAVE_EVERY = 5
COLUMNS = ("way", "kills", "recovered", "median", "worst")


def measure(way: str, nproc: int, kills: int, seed: int) -> dict[str, object]:
    """One row."""
    seconds, generator, lost = list[float](), random.Random(seed), 0
    while len(seconds) + lost < kills and lost < MOST_LOST:
        found = measure_one_command(way, nproc, kills - len(seconds) - lost, generator)
        lost += len(seconds) + lost + len(found) < kills
        seconds += found
    row: dict[str, object] = {"way": way, "kills": len(seconds) + lost, "recovered": len(seconds)}
    if seconds:
        row |= {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2)}
    return row


def measure_one_command(way: str, nproc: int, kills: int, generator: random.Random) -> list[float]:
    """Seconds of each recovery; fewer than `kills` where one did not come."""
    with tempfile.TemporaryDirectory() as name:
        watched = Watched(way, Path(name))
        command = Program(nproc, SAVE_EVERY, 0.0, kills + 1).start(way, watched.folder)
        try:
            return kill_again_and_again(watched, nproc, kills, generator)
        finally:
            end(command, watched)


def kill_again_and_again(watched: Watched, nproc: int, kills: int, generator: random.Random) -> list[float]:
    """The seconds of each recovery, up to the first that does not come."""
    seconds, before = list[float](), set[str]()
    for kill in range(kills):
        if not watched.wait(before, STEPS_BETWEEN, PATIENCE_SECONDS if kill else START_SECONDS):
            break
        before = watched.processes
        time.sleep(generator.random() * 0.1)
        killed = time.time()
        os.kill(watched.pids[kill % nproc], signal.SIGKILL)
        after = watched.wait(before, 1, PATIENCE_SECONDS)
        if not after:
            break
        seconds.append(after[0].at - killed)
    return seconds


def main() -> None:
    """Measure both ways and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="5 kills")
    add_way(parser)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    kills = 5 if chosen.quick else chosen.kills
    rows = [measure(way, chosen.nproc, kills, chosen.seed) for way in chosen.way]
    if chosen.json:
        print(json.dumps({"nproc": chosen.nproc, "rows": rows}))
        return
    headings: dict[str, Any] = dict(zip(COLUMNS, COLUMNS, strict=True))
    for names in [headings, *rows]:
        print("  ".join(f"{names.get(name, '-')!s:>9}" for name in COLUMNS))


if __name__ == "__main__":
    main()
