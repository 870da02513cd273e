"""Rank 0's copy of a model, where there is room for it and it can be made."""

import threading
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from allranks.training.own import starts
from allranks.training.own.starts import copy_whole


def test_a_copy_is_apart_from_the_model() -> None:
    model = nn.Linear(2, 2)
    found = copy_whole(model)
    assert found.module is not None and not found.missing
    before = model.weight.detach().clone()
    with torch.no_grad():
        found.module.get_parameter("weight").zero_()
    assert torch.equal(model.weight, before)


def test_a_copy_that_takes_more_than_half_of_what_is_free_is_not_made() -> None:
    model = nn.BatchNorm1d(100, dtype=torch.float64)  # 4 x 100 numbers, and a count: 3,208 bytes
    with patch.object(starts, "free_host_bytes", lambda: 6_415):
        found = copy_whole(model)
    assert found.module is None
    assert found.missing == "a copy takes 3.2 kB, and 6.4 kB are free on rank 0's host"
    with patch.object(starts, "free_host_bytes", lambda: 6_416):
        assert copy_whole(model).module is not None


def test_what_cannot_be_copied_is_said() -> None:
    model: Any = nn.Linear(2, 2)
    model.lock = threading.Lock()
    found = copy_whole(model)
    assert (found.module, found.missing) == (
        None,
        "rank 0 could not copy it (TypeError: cannot pickle '_thread.lock' object)",
    )
