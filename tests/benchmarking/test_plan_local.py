"""The program that sets predicted steps beside measured ones: it runs, and what it says follows from its rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "plan_local.py"
LIMIT_SECONDS = 300


@pytest.mark.full
@pytest.mark.distributed
def test_a_quick_run_predicts_and_measures_every_layout() -> None:
    command = [sys.executable, str(PROGRAM), "--quick", "--turns", "1", "--model", "perceptron", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    rows = found["rows"]
    assert [row["layout"] for row in rows] == ["dp_replicate=2", "dp_replicate=2", "dp_shard=2", "pp=2"]
    for row in rows:
        assert row["predicted_ms"] == pytest.approx(sum(row["parts_ms"].values()))
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
        assert 0 < row["fastest_ms"] <= row["measured_ms"]
    assert found["mean_error"] == pytest.approx(sum(abs(row["error"]) for row in rows) / len(rows))
    best, chosen = (min(rows, key=lambda row: row[name]) for name in ("measured_ms", "predicted_ms"))
    (choice,) = found["choices"]
    assert choice["best"] == f"{best['layout']} of {best['micro_batch']}" and choice["model"] == "perceptron"
    assert choice["slower"] == pytest.approx(chosen["measured_ms"] / best["measured_ms"] - 1)
    assert "--quick" in found["calibration"]["2"] and found["refused"] == []
