"""An hour of random faults: what share of it ends as training (ETTR), ours beside torchrun with its checkpoints.

    python bench/hour_of_faults.py [--minutes 60] [--mean 60] [--nproc 2] [--seed 0] [--quick] [--json]
                                   [--way allranks] [--kind agent]

Both train a tiny model under DDP at the same time, each step sleeps 50 ms, a checkpoint every 20 steps. Each has faults
of its own, `--mean` seconds apart on average (exponential), none before a step of the recovery before:

    kill    SIGKILL to one worker                                   three of five
    stop    SIGSTOP to one worker, which nothing wakes again        one of five
    agent   SIGKILL to the launcher                                 one of five

A command that has ended is started again at once, as a job script does that is requeued, after all that it left was
killed; with the same arguments. torchrun's processes give a collective up after a minute (torch's own limit is half an
hour). ETTR is the last step's number times the median seconds of a step, over the seconds from the first step to the
end: a step counts once, however often it was made.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recovering_runs import Program, Watched, add_way, end

KINDS = ("kill", "kill", "kill", "stop", "agent")
PAUSE_SECONDS, SAVE_EVERY = 0.05, 20
GIVE_UP_SECONDS = 60.0  # torchrun's collectives
START_SECONDS = 180.0


class Trial(threading.Thread):
    """One way's hour.

    Attributes:
        document: what came of it, once it has ended.
    """

    def __init__(self, way: str, nproc: int, seconds: float, mean: float, seed: int, kinds: Sequence[str]) -> None:
        super().__init__(name=way)
        self.document: dict[str, Any] = {}
        self._way, self._nproc, self._seconds, self._mean = way, nproc, seconds, mean
        self._draw = random.Random(f"{way} {seed}")
        self._kinds = kinds
        self._faults: list[dict[str, Any]] = []
        self._restarted = 0

    def run(self) -> None:
        """Start it, break it until the time is over, and end it."""
        program = Program(self._nproc, SAVE_EVERY, PAUSE_SECONDS, 10_000, GIVE_UP_SECONDS)
        with tempfile.TemporaryDirectory() as name:
            self._watched = Watched(self._way, Path(name))
            self._command = program.start(self._way, self._watched.folder)
            over = threading.Event()
            keeper = threading.Thread(target=self._keep, args=(program, over))
            keeper.start()
            try:
                self._break()
            finally:
                over.set()
                keeper.join()
                end(self._command, self._watched)
            self.document = self._summary()

    def _keep(self, program: Program, over: threading.Event) -> None:
        """Start the command again whenever it has ended."""
        while not over.wait(0.05):
            if self._command.poll() is not None:
                end(self._command, self._watched)
                self._command = program.start(self._way, self._watched.folder)
                self._restarted += 1

    def _break(self) -> None:
        watched = self._watched
        if not watched.wait(set(), 3, START_SECONDS):
            raise SystemExit(f"{self._way}: no step within {START_SECONDS:.0f} s of the start")
        deadline = watched.steps[0].at + self._seconds
        while (left := deadline - time.time()) > 0:
            time.sleep(min(left, self._draw.expovariate(1 / self._mean)))
            if time.time() >= deadline:
                break
            watched.look()
            before, kind = watched.processes, self._draw.choice(self._kinds)
            step, at = watched.steps[-1].number, time.time()
            fault: dict[str, Any] = {"kind": kind, "at": at, "step": step}
            self._faults.append(fault)
            self._strike(kind)
            after = watched.wait(before, 1, deadline - time.time())
            if after:
                fault |= {"seconds": after[0].at - at, "lost": step + 1 - after[0].number}
        watched.look()

    def _strike(self, kind: str) -> None:
        victim = self._command.pid if kind == "agent" else self._watched.pids[self._draw.randrange(self._nproc)]
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    def _summary(self) -> dict[str, Any]:
        steps = self._watched.steps
        pairs = itertools.pairwise(steps)
        usual = statistics.median(b.at - a.at for a, b in pairs if a.process == b.process and b.number == a.number + 1)
        attempts = len(self._watched.processes)
        return {
            "way": self._way,
            "ettr": max(step.number for step in steps) * usual / self._seconds,
            "step_seconds": usual,
            "faults": self._faults,
            "recovered": sum("seconds" in fault for fault in self._faults),
            "restarts_without_a_fault": max(0, attempts - 1 - len(self._faults)),
            "commands_started_again": self._restarted,
        }


def show(document: dict[str, Any]) -> None:
    """A few lines of one way."""
    faults = document["faults"]
    print(f"{document['way']}: ETTR {document['ettr']:.1%}; {document['recovered']} of {len(faults)} faults recovered")
    for kind in sorted(set(KINDS)):
        seconds = sorted(fault["seconds"] for fault in faults if fault["kind"] == kind and "seconds" in fault)
        lost = [fault["lost"] for fault in faults if fault["kind"] == kind and "lost" in fault]
        if seconds:
            told = f"median {statistics.median(seconds):6.2f} s, worst {seconds[-1]:6.2f} s"
            print(f"  {kind:5}  {len(seconds):3} recovered, {told}, {statistics.mean(lost):.1f} steps made again")
    print(f"  {document['restarts_without_a_fault']} restarts without a fault")


def main() -> None:
    """Both hours at once, then print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--mean", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a minute, a fault every 10 seconds")
    add_way(parser)
    parser.add_argument("--kind", nargs="+", choices=sorted(set(KINDS)), default=KINDS, help="all, unless named")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    minutes, mean = (1.0, 10.0) if chosen.quick else (chosen.minutes, chosen.mean)
    trials = [Trial(way, chosen.nproc, minutes * 60, mean, chosen.seed, chosen.kind) for way in chosen.way]
    for trial in trials:
        trial.start()
    for trial in trials:
        trial.join()
    if chosen.json:
        print(json.dumps({"minutes": minutes, "mean_seconds": mean, "ways": [trial.document for trial in trials]}))
        return
    for trial in trials:
        show(trial.document)


if __name__ == "__main__":
    main()
