"""What is small and found: one gradient off by a billionth in float64, by two percent in bfloat16, end to end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.request import TrainRequest
from allranks.stepping.passes import PlainPasses
from allranks.verifying.answer import Answer
from allranks.verifying.task_verify import verify_task
from tests.commands import PROGRAMS

OFF_BY = str(PROGRAMS / "off_by.py")
TENSOR = "2.weight"
BENCH = Path(__file__).parents[2] / "bench" / "sensitivity.py"
TENSORS, NOT_FOUND = 38, 4  # of the transformer; which ones rounding hides depends on kernels


@pytest.fixture(autouse=True)
def passes_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Task changes them where it is made, which is in this process, too."""
    monkeypatch.setattr(PlainPasses, "run", PlainPasses.run)


def verify(layout: str, *overrides: str) -> Answer:
    return verify_task(TrainRequest(task_spec=OFF_BY, layout=layout, nproc=2, overrides=overrides, device="cpu"), 2)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp=2"])
@pytest.mark.parametrize(("factor", "precision"), [(1 + 1e-9, "float64"), (1.02, "bfloat16")])
def test_a_small_factor_is_found_under_every_cut(layout: str, factor: float, precision: str) -> None:
    answer = verify(layout, f"task.factor={factor!r}", f"train.precision={precision}")
    assert answer.exit_code == 1, str(answer)
    (finding,) = answer.findings
    assert finding.tensor == TENSOR and finding.step == 0, str(answer)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["fsdp", "tp=2"])
def test_without_it_nothing_is_found(layout: str) -> None:
    assert verify(layout, "train.precision=bfloat16").exit_code == 0


def rows(*words: str) -> list[dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, BENCH, "--json", *words], capture_output=True, text=True, check=False, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)["rows"]
    return found


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_a_billionth_is_found_in_every_tensor_of_a_transformer(layout: str) -> None:
    (exact,) = rows("--tasks", "transformer", "--precisions", "float64", "--layouts", layout)
    assert exact["tensors"] == TENSORS and exact["not_found"] == [] and exact["worst"] <= 1e-9, exact


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_two_percent_are_found_in_nearly_every_tensor_of_a_transformer(layout: str) -> None:
    (low,) = rows("--tasks", "transformer", "--precisions", "bfloat16", "--layouts", layout)
    assert low["tensors"] == TENSORS and len(low["not_found"]) <= NOT_FOUND and low["median"] < 0.015, low


@pytest.mark.full
@pytest.mark.distributed
def test_the_table_is_what_the_program_finds() -> None:
    exact, low = rows("--quick")
    assert (exact["precision"], low["precision"]) == ("float64", "bfloat16")
    assert exact["tensors"] == 4 and exact["not_found"] == low["not_found"] == []
    assert 1e-13 < exact["median"] <= exact["worst"] <= 1e-9 and 0.003 < low["median"] <= low["worst"] <= 0.02
