"""bench/plan_speed.py runs; how fast it is depends on the machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def speed(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "bench/plan_speed.py", "--quick", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_quick_form_prints_its_figures() -> None:
    found = json.loads(speed("--json"))
    assert set(found) == {"configurations", "mean_us", "median_us", "worst_us"}
    assert found["configurations"] > 100 and 0 < found["median_us"] <= found["worst_us"]
    assert [line.split()[0] for line in speed().splitlines()] == list(found)
