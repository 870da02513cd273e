"""What the allocators are told, and that a GPU which cannot do it is believed."""

from typing import Any

import pytest
import torch

from allranks.parallel import allocator
from allranks.parallel.allocator import keep_memory, prove_growth

CUDA = torch.device("cuda", 2)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(allocator, "keep_heap", lambda: found.append("heap"))
    return found


def test_segments_grow_unless_the_user_says_otherwise(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not keep_memory(torch.device("cpu"))
    assert keep_memory(CUDA)
    assert told == ["heap", "expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert not keep_memory(CUDA)
    assert len(told) == 2


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("CUDA driver error: operation not supported", ["expandable_segments:False"]),
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", []),
        ("", []),
    ],
)
def test_a_gpu_that_maps_no_pages_is_believed(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, reason: str, settings: list[str]
) -> None:
    """What else fails at the first allocation is met where it would have been."""

    def allocate(size: int, *, device: torch.device) -> None:
        assert (size, device) == (1, CUDA)
        if reason:
            raise RuntimeError(reason)

    monkeypatch.setattr(torch, "empty", allocate)
    decision = prove_growth(CUDA)
    assert told == settings
    assert (decision is not None) == bool(settings)
    if decision is not None:
        assert str(decision) == ("segments of GPU memory do not grow, because cuda:2 does not map memory page by page")
