"""A run's upkeep, of its config and of what was loaded."""

from typing import Any

import pytest

from allranks.config import Config
from allranks.stepping.profiled_step import FirstBatches
from allranks.stepping.upkeep import upkeep_of
from allranks.upkeep import Upkeep

CONFIG = Config.model_validate({"checkpoint": {"every": 50}, "data": {"workers": 4}, "train": {"global_batch": 8}})


@pytest.mark.parametrize(
    ("order", "workers", "reads_all"), [("map", 4, False), ("global", 1, True), ("sharded", 1, False)]
)
def test_an_iterable_has_one_process_and_a_global_one_is_read_by_all(order: Any, workers: int, reads_all: bool) -> None:
    found = upkeep_of(CONFIG, "cuda", FirstBatches((), order, 0.25))
    assert found == Upkeep(50, True, 0.25, workers, reads_all=reads_all)


@pytest.mark.parametrize(
    ("more", "copies"), [({}, 0), ({"memory_every": 5}, 3), ({"memory_every": 5, "asynchronous": False}, 2)]
)
def test_copies_in_memory_are_counted(more: dict[str, Any], copies: int) -> None:
    config = Config.model_validate({"checkpoint": {"every": 50, **more}})
    for loaded in (None, FirstBatches((), "map", 0.25)):
        assert upkeep_of(config, "cuda", loaded).state_copies == copies


@pytest.mark.parametrize(
    ("more", "own", "values"),
    [
        ({}, False, 2),
        ({"train": {"ema": 0.99}}, False, 3),
        ({"optimizer": {"name": "sgd"}}, False, 0),
        ({"optimizer": {"name": "sgd", "momentum": 0.9}, "train": {"ema": 0.99}}, False, 2),
        ({"optimizer": {"name": "sgd"}, "train": {"ema": 0.99}}, True, 3),
    ],
)
def test_what_is_kept_for_each_parameter_is_counted(more: dict[str, Any], own: bool, values: int) -> None:
    """Of a Task's own optimizer nobody knows it: it counts as Adam."""
    config = Config.model_validate(more)
    for loaded in (None, FirstBatches((), "map", 0.25)):
        assert upkeep_of(config, "cuda", loaded, own_optimizer=own).state_values == values


@pytest.mark.parametrize(
    ("saves", "seconds"),
    [({}, 1800.0), ({"seconds": 0}, 0.0), ({"every": 50}, 0.0), ({"asynchronous": "auto"}, 0.0)],
)
def test_saves_by_time_are_told_where_their_copy_takes_memory(saves: dict[str, Any], seconds: float) -> None:
    saves = {"asynchronous": True, **saves}
    config = Config.model_validate({"checkpoint": saves})
    for loaded in (None, FirstBatches((), "map", 0.25)):
        assert upkeep_of(config, "cuda", loaded).save_seconds == seconds


def test_nothing_was_loaded_for_another_machine() -> None:
    assert upkeep_of(CONFIG, "cpu", None) == Upkeep(50, CONFIG.checkpoint.beside("cpu"), None, 4)
