"""Running statistics of several ranks: everybody's, their mean, the first rank's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.parallel.running_statistics import follow_first, gather_by_rank, mean_of_ranks
from tests.distributed.pool import Pools


def values_of(rank: int) -> dict[str, torch.Tensor]:
    """Of several dtypes and shapes, one without dims."""
    return {
        "mean": torch.arange(3.0) + rank,
        "count": torch.tensor(10 - rank),
        "table": torch.full((2, 2), 0.5 * rank, dtype=torch.float64),
        "var": torch.tensor([1.0, rank]),
    }


def gathered() -> Any:
    values = values_of(dist.get_rank())
    assert dist.group.WORLD is not None
    found = gather_by_rank(values, dist.group.WORLD)
    found["mean"][dist.get_rank()].zero_()
    assert values["mean"][1] == dist.get_rank() + 1, "what is gathered has memory of its own"
    follow_first(values, dist.group.WORLD)
    return found, values


def test_what_lies_on_several_devices_goes_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of a placement; the meta device stands for another one."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda flat, *_: sent.append(flat))
    monkeypatch.setattr(dist, "get_global_rank", lambda *_: 0)
    group: Any = None
    follow_first({"a": torch.zeros(3), "b": torch.zeros(4, device="meta"), "c": torch.zeros(5)}, group)
    assert [(one.device.type, len(one)) for one in sent] == [("cpu", 8), ("meta", 4)]


@pytest.mark.distributed
def test_every_rank_gets_everybodys_and_may_follow_the_first(pool: Pools) -> None:
    for rank, (found, followed) in enumerate(pool(3).run(gathered)):
        for name, value in values_of(0).items():
            assert torch.equal(followed[name], value)
            for other in range(3):
                if (name, other) != ("mean", rank):
                    assert torch.equal(found[name][other], values_of(other)[name])
                    assert found[name][other].dtype is value.dtype


def test_the_mean_of_counts_is_the_largest() -> None:
    ranks = [values_of(rank) for rank in range(3)]
    assert mean_of_ranks([values["mean"] for values in ranks]).tolist() == [1.0, 2.0, 3.0]
    assert int(mean_of_ranks([values["count"] for values in ranks])) == 10
    large = [torch.tensor([3e38]), torch.tensor([3e38])]
    assert mean_of_ranks(large).isfinite().all(), "summed in float64"
