"""bench/calibration_rows.py: which published rows a constant may see, and which other figures saw."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "bench")  # as Python does for the program itself
    calibration_rows = importlib.import_module("calibration_rows")


def published() -> Iterator[Any]:
    yield from calibration_rows.rows_of(json.loads(calibration_rows.DATA.read_text()))


def row(**changed: Any) -> dict[str, Any]:
    """One that the constants were fitted to, changed."""
    found = next(one for one in published() if calibration_rows.is_calibration(one) and one["source"] == "vtrain-multi")
    return {**found, **changed}


def test_rows_of_quality_c_are_not_fitted_to() -> None:
    assert calibration_rows.is_calibration(row())
    assert calibration_rows.is_calibration(row(quality="B"))
    assert not calibration_rows.is_calibration(row(quality="C"))


def test_rows_with_experts_are_not_fitted_to() -> None:
    model = row()["model"]
    assert not calibration_rows.is_calibration(row(model={**model, "experts": 8}))
    assert calibration_rows.is_calibration(row(model={**model, "experts": None}))


def test_rows_without_a_time_or_of_another_source_are_not_fitted_to() -> None:
    assert not calibration_rows.is_calibration(row(metrics={}))
    assert not calibration_rows.is_calibration(row(source="megatron-sc21-table2"))


def test_of_a_source_about_half_of_the_rows_are_fitted_to_and_none_that_is_refused() -> None:
    rows = list(published())
    taken = [one for one in rows if calibration_rows.is_calibration(one)]
    assert {one["source"] for one in taken} == set(calibration_rows.FITTED)
    assert not any(one.get("quality") == "C" or one["model"].get("experts") for one in taken)
    open_to_it = [one for one in rows if one["source"] in calibration_rows.FITTED]
    assert 0.3 < len(taken) / len(open_to_it) < 0.6


@pytest.mark.parametrize(("words", "count"), [((), None), (("--looked-at",), 3)])
def test_the_program_prints_them(words: tuple[str, ...], count: int | None) -> None:
    command = [sys.executable, "bench/calibration_rows.py", *words]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    if count is None:
        assert lines == [one["id"] for one in published() if calibration_rows.is_calibration(one)]
        return
    figures = {line.partition(": ")[2] for line in lines}
    assert figures == set(calibration_rows.LOOKED_AT) and len(figures) == count
    names = [line.partition(": ")[0] for line in lines if line.endswith("flash2 of the A100")]
    assert names == [f"torchtitan-a100-2024-{number}" for number in (33, 34, 35)]
    experts = {line.partition(": ")[0] for line in lines if line.endswith("EXPERTS")}
    timed = [one for one in published() if one["model"].get("experts") and one["metrics"].get("step_time_s")]
    assert experts == {one["id"] for one in timed}
