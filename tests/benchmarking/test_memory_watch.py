"""What is held counts, what was there before does not, and a peak within a step is seen."""

import sys
from pathlib import Path

import pytest
import torch

from allranks.benchmarking.memory_watch import MemoryWatch, allocated_bytes

MB = 1_000_000
pytestmark = pytest.mark.skipif(allocated_bytes() == 0, reason="this system does not tell what is allocated")


@pytest.fixture(autouse=True)
def _inductor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when its compiler is imported


def test_the_peak_of_a_step() -> None:
    before = torch.ones(5 * MB)
    watch = MemoryWatch(torch.device("cpu"))
    held = torch.ones(1 * MB)
    torch.ones(20 * MB)  # outside the step
    with watch:
        double = held * 2
        del double
        held + 1
    assert abs(watch.peak_bytes() - 8 * MB) < 0.1 * MB
    assert before.numel() == 5 * MB and sys.getrefcount(held)


def test_what_a_backward_holds_is_seen() -> None:
    weight = torch.ones(1 * MB, requires_grad=True)
    watch = MemoryWatch(torch.device("cpu"))
    with watch:
        (weight * weight.detach()).square().sum().backward()
    assert watch.peak_bytes() >= 12 * MB
