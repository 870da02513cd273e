"""bench/gpu/one_gpu.py, the script for a GPU machine: what it holds can fail, and the program works on a CPU."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[1] / "bench" / "gpu"
FALLS = [4.0, 3.0, 2.0]


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's own module beside it."""
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module("verdicts")


@pytest.mark.parametrize(
    ("losses", "expected", "ok"),
    [
        (FALLS, FALLS, True),
        ([4.0, 3.5, 2.19], FALLS, True),
        ([4.0, 3.5, 2.21], FALLS, False),
        ([4.0, 4.0, 4.0], FALLS, False),
        ([4.0, 3.0, math.nan], FALLS, False),
        ([4.0, 4.0, 3.9], [4.0, 4.0, 3.9], False),  # what nobody learns is no measure
    ],
)
def test_a_mode_is_held_to_a_tenth_of_the_fall(
    verdicts: Any, losses: list[float], expected: list[float], ok: bool
) -> None:
    assert verdicts.judge_mode("float8", losses, expected)["ok"] is ok


@pytest.mark.parametrize(
    ("ours", "ok"),
    [(FALLS, True), ([4.0, 3.3, 2.0], False), (FALLS[:2], False), ([4.0, math.nan, 2.0], False)],
)
def test_ours_and_raw_train_the_same(verdicts: Any, ours: list[float], ok: bool) -> None:
    assert verdicts.judge_losses(ours, FALLS)["ok"] is ok
    assert verdicts.judge_losses([4.0, 4.0], [4.0, 4.0])["ok"] is False


GOOD = {"mfu": 0.45, "speed_of_raw": 0.98, "memory_of_raw": 1.02}


@pytest.mark.parametrize(
    ("changed", "ok"),
    [
        ({}, [True, True, True]),
        ({"mfu": 0.449}, [False, True, True]),
        ({"speed_of_raw": 0.979}, [True, False, True]),
        ({"memory_of_raw": 1.021}, [True, True, False]),
        ({"mfu": None}, [None, True, True]),
        ({"device": "cpu", "mfu": 0.1}, [None, None, None]),
        ({"size": "tiny", "mfu": 0.1}, [None, None, None]),
    ],
)
def test_the_targets_are_held_on_a_gpu(verdicts: Any, changed: dict[str, Any], ok: list[bool | None]) -> None:
    losses = {"ours": FALLS, "raw": FALLS}
    rows = list(verdicts.judge_speed({"device": "NVIDIA H200", "size": "1b", "losses": losses, **GOOD, **changed}))
    assert [row["ok"] for row in rows] == [*ok, True]


@pytest.mark.full
@pytest.mark.timeout(1800)  # all modes by turns, beside other tests
def test_the_program_works_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--tiny", "--rounds", "1", "--only", "speed,checks", "--json", str(out)]
    ran = subprocess.run(
        [sys.executable, str(GPU / "one_gpu.py"), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert out.exists(), ran.stderr
    rows = {row["what"]: row for row in json.loads(out.read_text())["checks"]}
    on_a_gpu = {what for what in rows if what.startswith(("offload", "mfu", "speed", "memory"))}
    assert len(on_a_gpu) == 6 and all(rows[what]["ok"] is None for what in on_a_gpu)
    assert len(rows) > 15 and all(row["ok"] is True for what, row in rows.items() if what not in on_a_gpu), ran.stdout
    assert ran.returncode == 0


@pytest.mark.full
def test_a_mode_that_learns_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    modes = importlib.import_module("modes")
    checks = {"float32": (), "learns nothing": ("schedule.warmup=1000000",)}
    monkeypatch.setattr(modes, "CHECKS", checks)
    rows = list(modes.check_modes(modes.torch.device("cpu"), 20, 1))
    assert [row["ok"] for row in rows[:2]] == [True, False], rows
    assert "from float32, which fell by" in rows[1]["said"]


def test_a_ring_whose_blocks_are_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    kernels = importlib.import_module("ring_kernels")
    cpu = kernels.torch.device("cpu")
    assert kernels.check_ring(cpu)["ok"], kernels.check_ring(cpu)
    right = kernels.attend_backward

    def wrong(*given: Any, **how: Any) -> Any:
        return [1.05 * part for part in right(*given, **how)]

    monkeypatch.setattr(kernels, "attend_backward", wrong)
    assert kernels.check_ring(cpu)["ok"] is False
