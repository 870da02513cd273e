"""Median and deviation of a window; a judge that all ranks follow, and that a checkpoint keeps."""

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.errors import ConfigError
from allranks.stepping.spikes import ABOVE, FEWEST, SpikeJudge, Window, make_judge
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, processes_of
from tests.distributed.tasks import Tiny

CPU = torch.device("cpu")


def filled(values: list[float], size: int = 100, threshold: float = 10.0, above: float = 1.0) -> Window:
    window = Window(size, threshold, above)
    assert [window.add(value) for value in values] == [None] * len(values)
    return window


def test_what_is_a_spike() -> None:
    calm = [1.0 + 0.01 * (step % 7) for step in range(40)]
    assert filled(calm).add(5.0) == pytest.approx(1.03)
    assert filled(calm).add(1.9) is None, "ninety deviations, but not twice the median"
    wild = [random.Random(step).uniform(0.1, 3.0) for step in range(40)]
    assert filled(wild).add(4.0) is None and filled(wild).add(40.0) is not None
    assert filled(wild, threshold=50.0).add(40.0) is None
    assert filled([-5.0 + 0.1 * (step % 5) for step in range(40)]).add(3.0) is not None, "a loss may be negative"


def test_a_norm_may_be_three_times_its_median() -> None:
    calm = [1.0 + 0.01 * (step % 7) for step in range(40)]
    norms = filled(calm, above=ABOVE["grad_norm"])
    assert norms.add(3.1) is None and norms.add(5.3) is not None
    assert filled(calm, above=ABOVE["loss"]).add(3.1) is not None


def test_not_before_there_are_enough() -> None:
    assert filled([1.0] * (FEWEST - 1)).add(100.0) is None
    assert filled([1.0] * FEWEST).add(100.0) == 1.0
    assert filled([1.0] * 4, size=4).add(100.0) == 1.0


def test_a_level_that_stays_becomes_the_median() -> None:
    window = filled([1.0] * 40, size=40)
    found = [window.add(9.0) is not None for _ in range(40)]
    assert found[0] and not found[-1]


def test_what_is_not_finite_is_passed_over() -> None:
    assert filled([1.0, math.nan, math.inf] * 30).add(5.0) == 1.0


def test_a_spike_does_not_move_the_window() -> None:
    window = filled([1.0] * 30)
    assert [window.add(value) for value in (50.0, 60.0, 1.0, 70.0)] == [1.0, 1.0, None, 1.0]


def test_no_more_than_so_many_times_and_as_before_after_a_resume() -> None:
    first = SpikeJudge(50, 10.0, 2, CPU, None)
    assert not any(first.judge(1.0, step) for step in range(30))
    assert first.judge(9.0, 30) and first.found == {30: (9.0, 1.0)}
    second = SpikeJudge(50, 10.0, 2, CPU, None)
    for (_, value), (_, kept) in zip(second.parts(), first.parts(), strict=True):
        value.copy_(kept)
    for judge in (first, second):
        assert [judge.judge(9.0, step) for step in (31, 32)] == [True, False]


def judged(norms: list[float]) -> list[bool]:
    """In a worker: on each rank another norm after thirty equal ones."""
    judge = SpikeJudge(50, 10.0, 9, CPU, dist.group.WORLD)
    found = [judge.judge(1.0, step) for step in range(30)]
    return [any(found), judge.judge(norms[dist.get_rank()], 30)]


@pytest.mark.distributed
def test_all_ranks_follow_the_one(pool: Pools) -> None:
    """Two machines may round the last bit of a norm otherwise."""
    assert pool(2).run(judged, [1.0, 30.0]) == [[False, True]] * 2
    assert pool(2).run(judged, [1.0, 1.0]) == [[False, False]] * 2


def test_who_judges() -> None:
    class Own(Tiny):
        def step(self, models: Any, batch: Any) -> Any: ...

    for overrides, task, words in (
        (["guard.spike=skip"], Own(), r"Own has a step\(\) of its own"),
        (["guard.spike=skip", "train.precision=float16"], Tiny(), "float16"),
    ):
        config = config_of("single", *overrides)
        with pytest.raises(ConfigError, match=words):
            make_judge(task, config, processes_of(config))
    assert make_judge(Tiny(), config_of("single"), processes_of(config_of("single"))) is None
