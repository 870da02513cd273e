"""Every process was started alike."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Subset

from allranks.errors import ConfigError, DataError
from allranks.stepping.alike import check_same_start, explain_divergence, find_difference, on_any_rank
from allranks.task import Task
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny

CPU = torch.device("cpu")
SAME: dict[str, object] = {"train.seed": 0, "optimizer.lr": 0.1}


def test_the_first_rank_and_keys_that_differ_are_named() -> None:
    assert find_difference([(SAME, 64)] * 3) is None
    error = find_difference([(SAME, 64), (SAME, 64), (SAME | {"optimizer.lr": 0.2}, 64)])
    assert isinstance(error, ConfigError)
    assert "rank 2 was started with other settings than rank 0: optimizer.lr = 0.2 instead of 0.1;" in str(error)
    many = find_difference([({}, None), ({str(key): key for key in range(5)}, None)])
    assert "0 = 0 instead of None, 1 = 1 instead of None, 2 = 2 instead of None and 2 more" in str(many)


def test_nan_is_nan() -> None:
    """As each rank's JSON gives it."""
    first, second = (SAME | {"task.missing": float("nan"), "task.values": [1.0, float("nan")]} for _ in range(2))
    assert find_difference([(first, 64), (second, 64)]) is None
    error = find_difference([(first, 64), (SAME | {"task.missing": 0.0, "task.values": [1.0, 2.0]}, 64)])
    assert "task.missing = 0.0 instead of nan, task.values = [1.0, 2.0] instead of [1.0, nan]" in str(error)


def test_a_dataset_of_another_length_is_named() -> None:
    error = find_difference([(SAME, 64), (SAME, 72)])
    assert isinstance(error, DataError)
    assert "72 samples on rank 1 and 64 on rank 0" in str(error)


def test_one_process_has_nobody_to_differ_from() -> None:
    check_same_start(SAME, 64, None, CPU)


@pytest.mark.parametrize(
    ("path", "words"),
    [(("", "blocks.0"), "rank 0 blocks.0, rank 1 blocks.1."), (("", "blocks.1", "end"), "rank 0 end, rank 1 nothing")],
)
@pytest.mark.distributed
def test_where_the_ways_part_is_said_alike_on_all_ranks(pool: Pools, path: tuple[str, ...], words: str) -> None:
    first, second = pool(2).run(divergence, path)
    assert first == second and "in step 7 the ranks ran different modules: " + words in first


def divergence(path: tuple[str, ...]) -> str:
    mine = path if dist.get_rank() == 0 else ("", "blocks.1")
    return str(explain_divergence(mine, 7, dist.group.WORLD, CPU))


class Uneven(Tiny):
    """A host's copy of the data lacks a sample."""

    def dataset(self, split: str) -> Any:
        whole = super().dataset(split)
        return Subset(whole, range(len(whole) - dist.get_rank()))


def start(task: Task, rates: Sequence[float]) -> tuple[str, str] | None:
    rate = f"optimizer.lr={rates[dist.get_rank()]}"
    try:
        session_of(task, config_of("ddp", "train.global_batch=6", rate))
    except (ConfigError, DataError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.distributed
def test_all_ranks_refuse_what_one_has_got_wrong(pool: Pools) -> None:
    assert pool(2).run(start, Tiny(), (0.5, 0.5)) == [None, None]
    first, second = pool(2).run(start, Tiny(), (0.5, 0.25))
    assert first == second and first[0] == "ConfigError" and "optimizer.lr = 0.25 instead of 0.5" in first[1]
    first, second = pool(2).run(start, Uneven(), (0.5, 0.5))
    assert first == second and first[0] == "DataError" and "samples on rank 1" in first[1]


def told(*flags: bool) -> bool:
    """In a worker."""
    return on_any_rank(flags[dist.get_rank()], CPU, dist.group.WORLD)


@pytest.mark.distributed
def test_what_holds_on_one_rank_all_hear_of(pool: Pools) -> None:
    for flags in ((False, False), (False, True), (True, True)):
        assert pool(2).run(told, *flags) == [any(flags)] * 2
    assert on_any_rank(True, CPU, None) and not on_any_rank(False, CPU, None)
