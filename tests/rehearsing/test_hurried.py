"""What torch is spared changes nothing: parts are torch's, placements are looked at where they have to be."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor._sharding_prop as sharding_prop
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from allranks.rehearsing import dryrun
from allranks.rehearsing.hurried import CHUNKS, FLAG, Parts, _looking_once, hurried
from tests.rehearsing.tasks import Tokens, rehearsed


@pytest.mark.parametrize("dim", [0, 1])
def test_the_parts_are_those_that_torch_cuts(dim: int) -> None:
    for size in range(10):
        tensor = torch.arange(size * 3.0).view((size, 3) if dim == 0 else (3, size))
        for ranks in range(1, 7):
            expected = getattr(_fsdp_param, CHUNKS)(tensor, ranks, dim=dim)
            with hurried():
                found = getattr(_fsdp_param, CHUNKS)(tensor, ranks, dim=dim)
            assert isinstance(found, Parts) == (size > 0)
            assert len(found) == len(expected)
            assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert torch.equal(found[-1], expected[-1]) and len(found[1:]) == ranks - 1
            if size:
                assert found[0].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), "a view"


def test_placements_are_looked_at_once_and_strided_ones_by_torch() -> None:
    calls: list[object] = []
    looks = 0

    class Schema:
        def __init__(self, *placements: object) -> None:
            self.placements = placements

        @property
        def args_spec(self) -> list[object]:
            nonlocal looks
            looks += 1
            return [SimpleNamespace(placements=self.placements)]

    propagate = _looking_once(lambda strategy, schema: calls.append(schema))
    plain, strided = Schema(Shard(0)), Schema(Shard(0), _StridedShard(0, split_factor=2))
    for schema in (plain, plain, strided, strided, plain):
        propagate(None, schema)
    assert calls == [strided, strided] and looks == 3


def test_torch_is_as_before_afterwards() -> None:
    before = [getattr(owner, name, None) for owner, name in ((sharding_prop, FLAG), (_fsdp_param, CHUNKS))]
    with hurried():
        assert getattr(_fsdp_param, CHUNKS) is not before[1]
    assert before == [getattr(owner, name, None) for owner, name in ((sharding_prop, FLAG), (_fsdp_param, CHUNKS))]


@pytest.mark.parametrize(
    "layout", ["dp_shard=4", "dp_replicate=2,dp_shard=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.full)]
)
def test_a_rehearsal_is_what_it_is_without(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> object:
        return rehearsed(Tokens(layers=3), layout, 4, "train.global_batch=8", rank=3)

    quick = told()
    monkeypatch.setattr(dryrun, "hurried", nullcontext)
    assert told() == quick
