"""A request is a frozen value, empty where nothing was asked."""

import dataclasses

import pytest

from allranks.request import TrainRequest


def test_the_empty_request_asks_for_the_demo_on_whatever_is_there() -> None:
    asked = {
        name: value for name, value in dataclasses.asdict(TrainRequest()).items() if value not in (None, (), False)
    }
    assert asked == {"device": "auto"}


def test_a_request_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainRequest().nproc = 2  # type: ignore[misc]
