"""The mean of gradients over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from allranks.parallel import average
from allranks.parallel.average import alike, average_gradients
from tests.distributed.pool import Pools


def averaged() -> list[torch.Tensor | None]:
    """In a worker: gradients of two dtypes, one of which only the first rank has, and another no rank."""
    rank = dist.get_rank()
    parameters = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(()), torch.zeros(4)]
    parameters[0].grad = torch.full((3,), rank + 1.0)
    parameters[1].grad = torch.arange(4.0, dtype=torch.float64).reshape(2, 2).T * (rank + 1)
    if rank == 0:
        parameters[2].grad = torch.tensor(6.0)
    average_gradients(parameters, [None], 3)
    return [parameter.grad for parameter in parameters]


@pytest.mark.distributed
def test_sums_over_the_ranks_divided_once(pool: Pools) -> None:
    for first, second, third, fourth in pool(3).run(averaged):
        assert first is not None and first.tolist() == [2.0, 2.0, 2.0]
        assert second is not None and second.tolist() == [[0.0, 4.0], [2.0, 6.0]]
        assert third is not None and third.item() == 2.0
        assert fourth is None


def used() -> bool:
    """In a worker: nobody has a gradient of what is said to have one."""
    parameter = torch.zeros(3)
    average_gradients([parameter], [None], 2, used=True)
    return parameter.grad is not None and not parameter.grad.any()


@pytest.mark.distributed
def test_what_is_known_to_be_used_is_not_asked_for(pool: Pools) -> None:
    assert pool(2).run(used) == [True, True]


def test_a_rehearsal_takes_the_others_to_be_as_it_is() -> None:
    with FakeTensorMode():
        parameters = [torch.zeros(3), torch.zeros(3)]
        parameters[0].grad = torch.ones(3)
        average_gradients(parameters, [], 2)
    assert [parameter.grad is None for parameter in parameters] == [False, True]


def test_one_message_carries_what_is_of_one_dtype_on_one_device() -> None:
    """Under placement a process has gradients on several; on a processor the meta device stands for another one."""
    kinds = ((torch.float32, "cpu"), (torch.float32, "meta"), (torch.float64, "cpu"), (torch.float32, "cpu"))
    assert alike(torch.zeros(1, dtype=dtype, device=device) for dtype, device in kinds) == [[0, 3], [1], [2]]
    assert alike([]) == []


def test_gradients_travel_in_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one type each, in order, and none larger than it may be but for what is larger by itself."""
    monkeypatch.setattr(average, "PARCEL_BYTES", 40)
    tensors = [torch.zeros(5), torch.zeros(5), torch.zeros(1), torch.zeros(2, dtype=torch.float64)]
    assert average.parcels([*tensors, torch.zeros(50), torch.zeros(1)]) == [[0, 1], [2], [4], [5], [3]]
