"""Whether processes share a GPU, found by the names of their GPUs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from allranks.errors import ProcessError
from allranks.parallel.own_gpus import share_gpus, uuids_of


def answers(ranks: Sequence[Sequence[str]]) -> list[bool]:
    """Of all ranks with these GPUs, asked at the same time."""
    store = HashStore()
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda uuids: share_gpus(store, uuids, len(ranks), 30), ranks))


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        ([["a"], ["b"], ["c"], ["d"]], False),
        ([["a"], ["b"], ["a"], ["d"]], True),
        ([["a"], ["a"]], True),
        ([["a", "b"], ["c", "d"]], False),  # under placement
        ([["a", "b"], ["b", "a"]], True),
    ],
)
def test_all_ranks_have_one_answer(ranks: list[list[str]], shared: bool) -> None:
    assert answers(ranks) == [shared] * len(ranks)


def test_a_rank_that_does_not_come_is_told() -> None:
    with pytest.raises(ProcessError, match="1 of 2 ranks have come within 0 s") as told:
        share_gpus(HashStore(), ["a"], 2, 0.2)
    assert isinstance(told.value.__cause__, dist.DistError)


@pytest.mark.gpu
def test_gpus_have_names() -> None:
    (name,) = uuids_of([torch.device("cuda", 0)])
    assert len(name) == 36
