"""How long a dry run of 100 billion parameters on 64 devices takes, and how much memory: sharded, as a pipeline, split.

    python bench/hundred_billion.py [--json] [--layout LAYOUT]

Each is the command in a process of its own. Exit code 1: one took more than a minute or a gigabyte, or did not answer.
docs/explanation/measured.md has what it printed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

CLUSTER, BATCH = "8x8:a100-80g", ("train.global_batch=512", "train.micro_batch=1")
LAYOUTS = ("dp_shard=64,recompute=full", "pp=8,dp_shard=8,recompute=full", "dp_shard=8,tp=8,recompute=full")
GOAL_SECONDS, GOAL_BYTES = 60.0, 1e9


@dataclass(frozen=True)
class Row:
    """What one dry run took, and its verdict; answered: whether that is an answer, yes or no."""

    layout: str
    seconds: float
    memory_bytes: int
    verdict: str
    answered: bool

    @property
    def good(self) -> bool:
        """Whether it answered within the goals."""
        return self.answered and self.seconds <= GOAL_SECONDS and self.memory_bytes <= GOAL_BYTES


def words(layout: str) -> list[str]:
    """The command."""
    return ["allranks", "dryrun", "100b", "--cluster", CLUSTER, "--layout", layout, *BATCH]


def measure(layout: str) -> Row:
    """Rehearse one layout."""
    with tempfile.TemporaryFile() as told:
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", *words(layout)], stdout=told, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        told.seek(0)
        lines = told.read().decode().splitlines()
    verdict = next((line for line in lines if line.startswith(("fits: ", "does not fit: "))), "")
    answered = bool(verdict) and process.returncode in (0, 1)
    return Row(layout, seconds, 1024 * used.ru_maxrss, verdict or (lines or ["nothing was said"])[-1], answered)


def main() -> int:
    """Rehearse all of them, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layout", choices=LAYOUTS, help="this one only")
    asked = parser.parse_args()
    load = round(os.getloadavg()[0], 1)
    rows = [measure(layout) for layout in LAYOUTS if asked.layout in (None, layout)]
    if asked.json:
        print(json.dumps({"load": load, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        for row in rows:
            print(f"{row.seconds:6.1f} s  {row.memory_bytes / 1e6:5.0f} MB  {' '.join(words(row.layout))}")
            print(f"                  {row.verdict}")
        print(f"the goal is {GOAL_SECONDS:.0f} s and 1 GB for each; load before: {load}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
