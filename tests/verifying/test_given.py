"""Over which ranks fully_shard gathers parameters, and what modules are given and give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from allranks.verifying import observation as look
from allranks.verifying.given import do_alike, gathered_over, noting_given, told
from allranks.verifying.recording import Forwards, RunRecord, Start, StepRecord
from allranks.verifying.world_view import view_of
from tests.distributed.pool import Pools

X = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).sin()
SPLIT = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Tanh()).double()


def forwards(model: nn.Module, *batches: Any) -> Forwards:
    found = Forwards()
    with noting_given({"": model}, found):
        for batch in batches:
            model(batch)
    return found


def spread() -> dict[str, set[tuple[int, ...]]]:
    """Over which ranks ways of spreading a model gather it, on each of two ranks."""
    size = dist.get_world_size()
    line, plane = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    sharded, hybrid, tensor, both, half = net(), net(), net(), net(), net()
    fully_shard(sharded, mesh=line)
    fully_shard(hybrid, mesh=plane)
    parallelize_module(tensor, line, {"0": ColwiseParallel()})
    parallelize_module(both, plane["tp"], SPLIT)
    fully_shard(both, mesh=plane["dp"])
    fully_shard(half[0], mesh=line)
    parallelize_module(half, line, {"2": ColwiseParallel()})
    models = {"whole": net(), "sharded": sharded, "hybrid": hybrid, "tensor": tensor, "both": both, "half": half}
    return {
        name: set(gathered_over({"": model}, look.logical_parameters(model)).values()) for name, model in models.items()
    }


@pytest.mark.distributed
def test_what_fully_shard_has_cut_is_gathered_over_its_mesh(pool: Pools) -> None:
    for rank, told_here in enumerate(pool(2).run(spread)):
        assert told_here.pop("both") == {(rank,)}, "tp has cut it, too: the other rank holds other rows"
        assert told_here == {"whole": set(), "sharded": {(0, 1)}, "hybrid": {(0, 1)}, "tensor": set(), "half": {(0, 1)}}


def hybrid(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def tensor_inside(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], SPLIT)
    fully_shard(model, mesh=mesh["dp"])


def tensor_outside(model: nn.Module) -> None:
    """Over ranks 0 and 2, and 1 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    parallelize_module(model, mesh["tp"], SPLIT)


def sharded(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def fed(spread_it: Callable[[nn.Module], None], shares: int, parts: int) -> RunRecord:
    """A rank of four that is fed its share of `shares`, and computes one of `parts` of it."""
    model, rank = net(), dist.get_rank()
    spread_it(model)
    mine = torch.cat([X, X + 1]).chunk(shares)[rank * shares // 4]
    parameters = look.logical_parameters(model)
    start = Start(parameters=look.parts_of(parameters), gathered=gathered_over({"": model}, parameters))
    given = forwards(model, mine.chunk(parts)[rank % parts])
    return RunRecord(start=start, steps=[StepRecord(rows=look.rows_of(mine))], given=given)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("spread_it", "shares", "parts", "expected"),
    [
        (hybrid, 1, 1, (0, 1, 2, 3)),
        (hybrid, 2, 1, (0, 1, 2, 3)),  # a sampler that knows of dp_replicate alone
        (hybrid, 2, 2, (0, 0, 1, 1)),  # the positions of dp_replicate's samples are cut over dp_shard
        (tensor_inside, 1, 1, (0, 0, 1, 1)),
        (tensor_inside, 2, 1, (0, 0, 1, 1)),
        (tensor_outside, 1, 1, (0, 1, 0, 1)),
        (sharded, 1, 1, (0, 1, 2, 3)),
        (sharded, 1, 2, (0, 0, 1, 1)),
    ],
)
def test_ranks_that_repeat_each_other_are_data_ranks(
    pool: Pools, spread_it: Callable[[nn.Module], None], shares: int, parts: int, expected: tuple[int, ...]
) -> None:
    assert view_of(pool(4).run(fed, spread_it, shares, parts)).data_rank == expected


def test_what_modules_are_given_and_give() -> None:
    model, first = net(), forwards(net(), X)
    assert len(first.calls) == 10 and not first.unseen and forwards(model, X) == first
    assert do_alike(forwards(model, X[[2, 0, 1]]), first), "the order of samples is no difference"
    assert not do_alike(forwards(model, X[:2]), first) and not do_alike(forwards(model, X + 1e-3), first)
    assert do_alike(forwards(model, X, X[:1]), first) and do_alike(first, forwards(model, X, X[:1]))
    assert not do_alike(forwards(model, X[1:], X[:1]), first)


def test_what_a_module_gives_tells_of_what_it_cuts_itself() -> None:
    class Cut(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.chunk(2, 1)[self.rank]

    assert not do_alike(forwards(Cut(0), X), forwards(Cut(1), X))
    assert do_alike(forwards(Cut(0), X), forwards(Cut(0), X))


def test_what_is_compiled_scripted_or_not_called_is_not_seen() -> None:
    model = net()
    found = Forwards()
    with noting_given({"": model}, found):
        torch.compile(model, backend="eager", fullgraph=True)(X)
    assert found == Forwards(unseen=True)
    with pytest.warns(DeprecationWarning):
        scripted: Any = torch.jit.script(net())
    assert forwards(scripted, X) == Forwards(unseen=True)
    lone = nn.ModuleDict({"used": net(), "kept": nn.Linear(2, 2)})
    found = Forwards()
    with noting_given({"": lone}, found):
        lone["used"](X)
    assert len(found.calls) == 10 and found.unseen


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, -torch.inf]]), True),
        (torch.tensor([[torch.nan]]), torch.tensor([[torch.nan]]), True),
        (torch.eye(3)[:2], torch.eye(3)[1:], False),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([1j, 2.0]), torch.tensor([1j, 2.0j]), False),
        (torch.empty(0), torch.empty(0), True),
        (torch.zeros(2), torch.zeros(3), False),
    ],
)
def test_tensors_of_any_kind(one: torch.Tensor, other: torch.Tensor, alike: bool) -> None:
    forward, its = Forwards([told("a", one)]), Forwards([told("a", other)])
    assert do_alike(forward, its) == alike


def test_inside_of_torch_func_nothing_can_be_read() -> None:
    model, found = nn.Linear(4, 1), Forwards()
    with noting_given({"": model}, found):
        torch.func.vmap(model)(X.float())
    assert len(found.calls) == 2 and found.calls[0].values == (0.0, 0.0)
