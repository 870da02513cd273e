"""The losses that a checkpoint keeps: a resumed window judges as one that was never left."""

import math
from typing import Any

import pytest
import torch

from allranks.errors import ConfigError
from allranks.stepping.loss_window import LossWindow, make_window
from tests.distributed.sessions import config_of, processes_of
from tests.distributed.tasks import Tiny

CALM = [1.0 + 0.01 * (step % 7) for step in range(30)]


def filled(losses: list[float], size: int = 20) -> LossWindow:
    window = LossWindow(size, 10.0, 1)
    assert [window.add(loss) for loss in losses] == [None] * len(losses)
    return window


def test_a_spike_is_told_with_the_median() -> None:
    assert filled(CALM).add(5.0) == pytest.approx(1.03)
    assert filled(CALM).add(1.9) is None
    assert filled([*CALM, math.nan, math.inf]).add(5.0) is not None


def test_a_resumed_window_judges_as_the_uninterrupted_one() -> None:
    first = filled([9.0, *CALM], size=20)
    second = LossWindow(20, 10.0, 1)
    for (entry, value), (other, kept) in zip(second.parts(), first.parts(), strict=True):
        assert entry == other and entry.name == "losses.window"
        value.copy_(kept)
    later = [1.0, 5.0, 1.0, 6.0]
    assert [second.add(loss) for loss in later] == [first.add(loss) for loss in later]
    torch.testing.assert_close(second.parts()[0][1], first.parts()[0][1], rtol=0, atol=0, equal_nan=True)
    assert LossWindow(20, 10.0, 1).add(5.0) is None, "nothing to compare with yet"


def test_who_judges() -> None:
    class Own(Tiny):
        def step(self, models: Any, batch: Any) -> Any: ...

    config = config_of("single", "guard.spike=rollback")
    with pytest.raises(ConfigError, match=r"Own has a step\(\) of its own: use guard.spike=log"):
        make_window(Own(), config, processes_of(config))
    assert make_window(Tiny(), config, processes_of(config)) is not None
    assert make_window(Tiny(), config_of("single"), processes_of(config)) is None
