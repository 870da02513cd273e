"""Which blocks are left out, which stand for them, and when none can be."""

import pytest
import torch
from torch import nn

from allranks.rehearsing.shortening import NotShortened, _Shape, equal_runs


def test_runs_of_equal_blocks() -> None:
    wide = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*wide)
    names = ["0", "1", "2", "3", "4"]
    assert equal_runs(model, names) == [["0", "1"], ["2"], ["3"], ["4"]]
    assert equal_runs(model, names, begins={"1"}) == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert equal_runs(nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2)), ["0", "1"]) == [["0"], ["1"]]


def test_a_block_that_is_left_out_returns_what_it_is_given() -> None:
    shape, value = _Shape(), torch.ones(2, 3)
    shape.learn(nn.Identity(), (value,), {}, (value * 2, None))
    given = torch.zeros(2, 3)
    found = shape.pass_on(given, positions=None)
    assert found[0] is given and found[1] is None


def test_what_changes_the_shape_is_traced_in_full() -> None:
    with pytest.raises(NotShortened):
        _Shape().learn(nn.Linear(3, 4), (torch.ones(2, 3),), {}, torch.ones(2, 4))
    with pytest.raises(NotShortened):
        _Shape().learn(nn.Identity(), (torch.ones(2, 3),), {}, (torch.ones(2, 3), torch.ones(2, 3)))
