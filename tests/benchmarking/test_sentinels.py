"""bench/sentinels.py: what is charged to a step is what it says; the sentinels' part of it is at most a hundredth."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
CHARGED = """if True:
    import json, sys
    sys.path.insert(0, sys.argv[1])
    from sentinels import EVERY, WARM, Costs, describe
    costs = Costs(EVERY)
    # Steps of 1 s; looks of 1 ms, of 3 ms in a step with a round of 0.4 s: by the processor half of everything.
    for step in range(WARM + 2 * EVERY + 1):
        costs.begins.append((float(step), step / 2))
        due = step % EVERY == EVERY - 1
        costs.looks[step] = (0.003, 0.0015) if due else (0.001, 0.0005)
        if due:
            costs.rounds[step] = (0.4, 0.2)
    print(json.dumps(describe("10m", "ddp", 2, costs.row())))
"""


def told(*words: str) -> dict[str, object]:
    """What a program prints."""
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr
    document: dict[str, object] = json.loads(ran.stdout)
    return document


@pytest.mark.full
def test_a_step_is_charged_a_look_and_its_part_of_a_round() -> None:
    row = told("-c", CHARGED, str(BENCH))
    assert row["digest_every"] == 200 and row["rounds"] == 2 and row["met"] is True
    assert row["charged_seconds"] == pytest.approx(0.001 + (0.4 + 0.002) / 200)
    assert row["share"] == pytest.approx(0.00301) and row["processor_share"] == pytest.approx(0.00301)


@pytest.mark.full
@pytest.mark.distributed
def test_sentinels_take_at_most_a_hundredth_of_a_step() -> None:
    """By the processor's time: that of the wall has a busy machine's waits in it."""
    document = told(str(BENCH / "sentinels.py"), "--quick", "--json", "--runs", "single:1,ddp:2")
    rows = document["rows"]
    assert isinstance(rows, list) and [row["layout"] for row in rows] == ["single", "ddp"]
    for row in rows:
        assert 0 < row["look_processor_seconds"] < row["round_processor_seconds"]
        assert 0 < row["processor_share"] <= document["goal"] == 0.01
