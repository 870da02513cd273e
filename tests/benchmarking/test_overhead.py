"""bench/overhead.py runs on the present loop: it plays the part of a Saver."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "overhead.py"


@pytest.mark.full
def test_both_loops_take_turns() -> None:
    words = ["--quick", "--size", "tiny", "--nproc", "1", "--json"]
    ran = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)["rows"]
    assert (row["size"], row["processes"], row["turns"]) == ("tiny", 1, 10) and row["raw_ms"] > 0 < row["ours_ms"]
