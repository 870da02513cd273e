"""The small programs of a calibration run under the engine, each layout of them, and are what the planner takes."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from allranks.benchmarking import small_programs
from allranks.benchmarking.small_programs import Chain, measure_programs
from allranks.launching.environment import ALONE
from allranks.parallel.backend import DeviceChoice
from allranks.planning.fixed_costs import programs
from allranks.stepping.profile import trace_task


@pytest.fixture(autouse=True)
def compiler_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when its compiler is imported


@pytest.mark.full
def test_one_process_measures_its_programs_alone() -> None:
    with patch.object(small_programs, "QUICK_TURNS", 2):
        found = measure_programs(ALONE, DeviceChoice(torch.device("cpu"), "gloo", None, ()), quick=True)
    assert list(found) == programs(1) and all(0 < seconds < 60 for seconds in found.values())


def test_the_planner_sees_the_chain_as_equal_blocks() -> None:
    profile = trace_task(Chain(depth=3, parts=2), "float32")
    assert profile.num_repeated == 3 and profile.tensor_parallel
    assert profile.parameters == sum(parameter.numel() for parameter in Chain(depth=3, parts=2).model().parameters())
