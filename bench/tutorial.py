"""The seconds of every command of the tutorial of 100 billion parameters, one after the other as a reader gives them.

    python bench/tutorial.py [--json] [--page FILE]

Exit code 1: together they took longer than the goal of five minutes, or one of them failed. To fail is to end without
an answer: 0 and 1 are answers (yes and no, as "does not fit"), if there is one on standard output and no traceback.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tutorial" / "hundred-billion.md"
GOAL_SECONDS = 300


@dataclass(frozen=True)
class Row:
    """One command: what it took, and why it counts as failed ("": it has answered)."""

    command: str
    seconds: float
    failed: str


def run(command: str) -> Row:
    """Give one command."""
    words = shlex.split(command)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    return Row(" ".join(words), seconds, explain_failure(done.returncode, done.stdout, done.stderr))


def explain_failure(code: int, output: str, error: str) -> str:
    """Why a command has not answered, with the last line that it said; "" where it has."""
    answered = code in (0, 1) and output.strip() and "Traceback (most recent call last)" not in error
    if answered:
        return ""
    last = (error.strip() or output.strip() or "nothing was said").splitlines()[-1]
    return f"exit code {code}: {last}"


def main() -> None:
    """Run them all, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page whose commands are run")
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    commands = re.findall(r"^```bash\n(.*?)^```$", asked.page.read_text(), re.MULTILINE | re.DOTALL)
    rows = [run(command) for command in commands]
    whole = sum(row.seconds for row in rows)
    if asked.json:
        told = [{"seconds": round(r.seconds, 1), "command": r.command, "failed": r.failed} for r in rows]
        print(json.dumps({"commands": told, "seconds": round(whole, 1), "load": before}))
    else:
        for row in rows:
            print(f"{row.seconds:7.1f} s  {row.command}" + (f"\n           FAILED: {row.failed}" if row.failed else ""))
        print(f"{whole:7.1f} s  all of them; the goal is {GOAL_SECONDS} s; load before: {before:.1f}")
    sys.exit(whole > GOAL_SECONDS or any(row.failed for row in rows))


if __name__ == "__main__":
    main()
