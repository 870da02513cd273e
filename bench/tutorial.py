"""The seconds of every command of the tutorial of 100 billion parameters, one after the other as a reader gives them.

    python bench/tutorial.py [--json]

Exit code 1: together they took longer than the goal of five minutes.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tutorial" / "hundred-billion.md"
GOAL_SECONDS = 300


def main() -> None:
    """Run them all, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows: list[tuple[float, str]] = []
    before = os.getloadavg()[0]
    for command in re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        rows.append((time.monotonic() - began, " ".join(shlex.split(command))))
    whole = sum(seconds for seconds, _ in rows)
    if asked.json:
        told = [{"seconds": round(seconds, 1), "command": command} for seconds, command in rows]
        print(json.dumps({"commands": told, "seconds": round(whole, 1), "load": before}))
    else:
        print(*(f"{seconds:7.1f} s  {command}" for seconds, command in rows), sep="\n")
        print(f"{whole:7.1f} s  all of them; the goal is {GOAL_SECONDS} s; load before: {before:.1f}")
    sys.exit(whole > GOAL_SECONDS)


if __name__ == "__main__":
    main()
