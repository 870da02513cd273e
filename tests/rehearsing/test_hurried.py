"""What torch is spared changes nothing: parts are torch's, placements are looked at where they have to be."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.tensor._sharding_prop as sharding_prop
from torch import nn
from torch._subclasses.fake_tensor import TensorMetadata, extract_tensor_metadata
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from allranks.profiling.fakes import fake_mode
from allranks.rehearsing import dryrun
from allranks.rehearsing.hurried import CHUNKS, FLAG, FLATTEN, Parts, _looking_once, counting_once, hurried
from allranks.stepping import session
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


def test_tensors_that_differ_are_not_taken_for_each_other() -> None:
    """Each pair differs in one thing by which an operator's result does, and torch keeps results by what it knows."""
    with fake_mode() as mode, hurried():
        one = torch.empty(4, 6)
        others = [
            torch.empty(6, 4),
            torch.empty(4, 6, dtype=torch.bfloat16),
            torch.empty(6, 4).t(),
            torch.empty(24).view(4, 6),
            torch.empty(8, 6)[2:6],
            torch.empty(4, 6, device="meta"),
            torch.empty(4, 6, requires_grad=True),
        ]
        known = []
        for tensor in (one, torch.empty(4, 6), *others):
            result: list[object] = []
            vars(TensorMetadata)[FLATTEN](extract_tensor_metadata(tensor), result, mode, None)
            known.append(tuple(result))
            assert len(result) == 1 and hash(known[-1]) == hash(tuple(result))
    assert known[0] == known[1] == known[5], "as torch has it, a view of all is the same"
    assert len(set(known)) == len(others)


def test_torch_is_as_before_afterwards() -> None:
    places = ((sharding_prop, FLAG), (_fsdp_param, CHUNKS), (TensorMetadata, FLATTEN))
    before = [getattr(owner, name, None) for owner, name in places]
    with hurried():
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(places[1:], before[1:], strict=True))
    assert before == [getattr(owner, name, None) for owner, name in places]


def test_what_a_pipeline_weighs_is_counted_once_for_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Sequence[str]] = []

    def count(*given: Any) -> list[float]:
        calls.append(given[-1])
        return [float(len(calls))]

    def ask(module: nn.Module, *names: str) -> list[float]:
        found: list[float] = vars(session)["count_between"](None, None, 0, None, module, names)
        return found

    monkeypatch.setattr(session, "count_between", count)
    with counting_once():
        assert ask(nn.Linear(2, 3), "a") == ask(nn.Linear(2, 3), "a") == [1.0]
        assert ask(nn.Linear(2, 4), "a") == [2.0], "another model is counted for itself"
        assert ask(nn.Linear(2, 3), "a", "b") == [3.0]
    assert vars(session)["count_between"] is count and len(calls) == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "layout", ["dp_shard=4", "dp_replicate=2,dp_shard=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.full)]
)
def test_a_rehearsal_is_what_it_is_without(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> object:
        return rehearsed(Tokens(layers=3), layout, 4, "train.global_batch=8", rank=3)

    quick = told()
    monkeypatch.setattr(dryrun, "hurried", nullcontext)
    assert told() == quick
