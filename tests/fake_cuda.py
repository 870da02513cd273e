"""Several CUDA devices that are not there: their generators are the CPU's kind, and one of them is the current one."""

import pytest
import torch

from allranks.data import random_keys


def put_in(monkeypatch: pytest.MonkeyPatch, number: int, current: int = 0) -> tuple[torch.Generator, ...]:
    """As if `number` CUDA devices were in use; their generators. What a test notes of them is forgotten after it."""
    generators = tuple(torch.Generator() for _ in range(number))
    monkeypatch.setattr(random_keys, "_devices", ())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: generators[index].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: generators[index].set_state(state))
    return generators
