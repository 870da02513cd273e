"""Experts that are cut: who is taken for one, what each rank holds, and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.models.moe import Experts, MixtureOfExperts, MoETransformer, Router
from allranks.parallel.expert import is_experts
from tests.distributed.pool import Pools
from tests.distributed.tasks import Fresh
from tests.parallel.spreads import spread


class Named(nn.Module):
    """Number and parameters, and another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens @ self.weight.T


class Doubled(Experts):
    """A user's own, of another class."""


class Mixed(nn.Module):
    """A user's own layer around it."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(2, 6), experts, nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.tensor([len(x) - 1, 0, 1, 0])
        found: torch.Tensor = self.last(self.experts(self.first(x), counts))
        return found


def test_who_is_taken_for_experts() -> None:
    assert is_experts(Experts(4, 6, 3)) and is_experts(Doubled(4, 6, 3))
    assert not any(map(is_experts, (Named(), Router(6, 4, 2), MixtureOfExperts(6, 3, 4, 2), nn.Linear(4, 4))))


def build() -> nn.Module:
    return Mixed(Doubled(4, 6, 3))


def look(layout: Layout) -> Any:
    found = spread(build, layout, "float64")
    entry = found.map["experts.gate"]
    held = found.tensors["experts.gate"]
    torch.manual_seed(0)
    whole = build().get_parameter("experts.gate").double()
    start = entry.box.offset[0]
    same = torch.equal(found.local("experts.gate"), whole[start : start + entry.box.shape[0]])
    kinds = isinstance(held, DTensor), isinstance(found.tensors["last.weight"], DTensor)
    wrapped = isinstance(found.modules[""], DistributedDataParallel)
    (said,) = (decision.what for decision in found.decisions if "ep=" in decision.what)
    return entry.shape, start, entry.box.shape, entry.holders, dict(entry.placements), same, kinds, wrapped, said


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=4, ep=2), Layout(dp_shard=4, ep=2, sharding="optimizer"), Layout(2, 2, ep=2)],
    ids=str,
)
def test_each_rank_holds_some_of_the_users_values(pool: Pools, layout: Layout) -> None:
    for rank, found in enumerate(pool(4).run(look, layout)):
        shape, start, part, holders, placements, same, kinds, wrapped, said = found
        assert (shape, start, part) == ((4, 6, 3), 2 * (rank % 2), (2, 6, 3))
        assert holders == ((0, 2), (1, 3))[rank % 2] and placements == {"ep": "shard(0)"}
        assert same and kinds == (False, layout.fully_sharded) and wrapped != layout.fully_sharded
        assert said == "each of ep=2 ranks holds 2 of 4 experts a layer"


@pytest.mark.distributed
def test_ranks_that_hold_the_same_experts_shard_them(pool: Pools) -> None:
    """Each of four then holds a whole expert of four; and of two for each rank of three, a part of its columns."""
    for rank, found in enumerate(pool(4).run(look, Layout(dp_shard=4, ep=2))):
        shape, start, part, holders, placements, same, kinds, _, said = found
        assert (shape, start, part, holders) == ((4, 6, 3), (0, 2, 1, 3)[rank], (1, 6, 3), (rank,))
        assert placements == {"ep": "shard(0)", "dp_shard": "shard(0)"} and same and kinds == (True, True)
        assert (
            said == "each of ep=2 ranks holds 2 of 4 experts a layer, sharded over the 2 ranks that hold the same ones"
        )
    for rank, (_, start, part, holders, placements, *_) in enumerate(pool(6).run(look, Layout(dp_shard=6, ep=2))):
        assert (start, part, holders) == (2 * (rank % 2), (2, 2, 3), (rank,))
        assert placements == {"ep": "shard(0)", "dp_shard": "shard(1)"}


X = torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2)


def gradients(layout: Layout, frozen: str) -> float:
    """In a worker: the largest error of a gradient, where every rank has the same samples."""

    def make() -> nn.Module:
        module = build()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(frozen not in name if frozen else True)
        return module

    torch.manual_seed(0)
    whole, cut = make().double(), spread(make, layout, "float64")
    for module in (whole, cut.modules[""]):
        module(X).square().sum().backward()
    cut.reduce_scalars()
    errors = []
    for name, parameter in whole.named_parameters():
        grad, box = cut.tensors[name].grad, cut.map[name].box
        local = grad._local_tensor if isinstance(grad, DTensor) else grad
        place = tuple(slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
        if parameter.grad is None:
            assert local is None
        else:
            assert local is not None, name
            errors.append(float((local - parameter.grad[place]).abs().max()) if local.numel() else 0.0)
    return max(errors)


@pytest.mark.distributed
@pytest.mark.parametrize("frozen", ["", "experts", "first", "experts.up"])
def test_gradients_are_the_mean_over_the_data_ranks(pool: Pools, frozen: str) -> None:
    for layout in (Layout(dp_replicate=2, ep=2), Layout(dp_shard=2, ep=2)):
        assert max(pool(2).run(gradients, layout, frozen)) < 1e-13
    if frozen == "":
        assert max(pool(4).run(gradients, Layout(dp_replicate=4, ep=2), frozen)) < 1e-13
    assert max(pool(4).run(gradients, Layout(dp_shard=4, ep=2), frozen)) < 1e-13


def only_experts_learn() -> bool:
    """In a worker: DDP has nothing to do, and the experts are reduced all the same."""

    def make() -> nn.Module:
        module = build()
        module.requires_grad_(False)
        module.get_submodule("experts").requires_grad_(True)
        return module

    cut = spread(make, Layout(dp_replicate=2, ep=2), "float64")
    cut.modules[""](X).sum().backward()
    cut.reduce_scalars()
    grad = cut.tensors["experts.down"].grad
    return not isinstance(cut.modules[""], DistributedDataParallel) and grad is not None


@pytest.mark.distributed
def test_experts_alone_may_learn(pool: Pools) -> None:
    assert pool(2).run(only_experts_learn) == [True, True]


def partly_reached() -> list[float | None]:
    """In a worker: the gradients of two parameters, after the first rank had one of the first."""
    cut = spread(build, Layout(dp_replicate=4, ep=2), "float64")
    parameters = [cut.tensors[f"experts.{name}"] for name in ("up", "down")]
    if dist.get_rank() == 0:
        parameters[0].grad = torch.ones_like(parameters[0])
    cut.reduce_scalars()
    return [None if parameter.grad is None else float(parameter.grad.mean()) for parameter in parameters]


@pytest.mark.distributed
def test_what_one_rank_has_reached_all_have(pool: Pools) -> None:
    """On one device the experts are one parameter: a token for any of them gives it a gradient, of zeros for others."""
    assert pool(4).run(partly_reached) == [[0.25, None], [0.0, None], [0.25, None], [0.0, None]]


def refusal(make: Any, ep: int) -> str:
    try:
        spread(make, Layout(dp_replicate=ep, ep=ep))
    except LayoutError as error:
        return str(error)
    return ""


def not_stacked() -> nn.Module:
    module = Doubled(4, 6, 3)
    module.scale = nn.Parameter(torch.ones(6))
    return Mixed(module)


def nested() -> nn.Module:
    module = Doubled(4, 6, 3)
    module.last = nn.Linear(6, 4)
    return Mixed(module)


def buffered() -> nn.Module:
    module = Doubled(4, 6, 3)
    module.register_buffer("scale", torch.ones(4))
    return Mixed(module)


def shared() -> nn.Module:
    module = build()
    module.other = module.get_parameter("experts.gate")
    return module


def of_six() -> nn.Module:
    return MoETransformer(7, 1, 8, 2, num_experts=6, top_k=2, max_seq=4)


REFUSALS = [
    (of_six, 4, "layers.0.feed_forward.experts has num_experts=6, which ep(4) does not divide; ep can be 1, 2, 3, 6"),
    (
        lambda: nn.Linear(2, 2),
        2,
        "ep=2 cuts experts over ranks, and model() has none: no module has num_experts, parameters stacked by expert "
        "and forward(tokens, tokens_per_expert); leave ep out, or see docs/how-to/experts.md",
    ),
    (not_stacked, 2, "ep=2: experts.scale is no parameter stacked by expert: every parameter of experts"),
    (nested, 2, "ep=2: experts.last.weight is no parameter stacked by expert: every parameter of experts"),
    (buffered, 2, "ep=2: experts.scale is no parameter stacked by expert: every parameter of experts"),
    (shared, 2, "ep=2: other is shared with experts, which are cut: untie them"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("make", "ep", "message"), REFUSALS)
def test_what_cannot_be_cut_is_refused_on_every_rank(pool: Pools, make: Any, ep: int, message: str) -> None:
    for found in pool(ep).run(refusal, make, ep):
        assert found.startswith(message)


def starved() -> float:
    """In a worker: the largest difference of output and gradients, where the second rank's experts get no token, and
    where one expert of that rank gets one from each."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return MixtureOfExperts(6, 3, num_experts=4, top_k=2)

    whole, cut = make().double(), spread(make, Layout(dp_replicate=2, ep=2), "float64")
    found = []
    for bias in ([5.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0]):
        for module in (whole, cut.bare()):
            router = module.get_submodule("router")
            router.get_buffer("bias").copy_(torch.tensor(bias))
        value = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
        outputs = [module(value) for module in (whole, cut.modules[""])]
        for output in outputs:
            output.square().sum().backward()
        cut.reduce_scalars()
        found.append(float((outputs[0] - outputs[1]).detach().abs().max()))
        for name, parameter in whole.named_parameters():
            place, grad = slice(*(2 * (cut.mesh.rank + n) for n in (0, 1))), cut.tensors[name].grad
            assert grad is not None and parameter.grad is not None
            expected = parameter.grad[place] if "experts" in name else parameter.grad
            found.append(float((grad - expected).abs().max()))
            cut.tensors[name].grad = parameter.grad = None
    return max(found)


@pytest.mark.distributed
def test_a_rank_that_gets_no_token_takes_part(pool: Pools) -> None:
    assert max(pool(2).run(starved)) < 1e-13


class Sparing(Experts):
    """A user's own, which does nothing for an expert without tokens."""

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(tokens)
        ends = tokens_per_expert.cumsum(0).tolist()
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                up = tokens[start:end] @ self.gate[expert] * (tokens[start:end] @ self.up[expert])
                found = found.index_add(0, torch.arange(start, end), up @ self.down[expert])
        return found


def spared() -> float:
    """In a worker: the largest error of an expert's gradient, where the tokens of two ranks are for one half of the
    experts, so that of those who share the other half one has none.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Sparing(4, 6, 3)

    whole, cut = make().double(), spread(lambda: nn.Sequential(make()), Layout(dp_shard=4, ep=2), "float64")
    value = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    counts = {0: [3, 2, 0, 0], 1: [1, 2, 0, 2]}
    for rank in range(4):
        whole(value, torch.tensor(counts[rank // 2])).square().sum().backward()
    cut.bare().get_submodule("0")(value, torch.tensor(counts[dist.get_rank() // 2])).square().sum().backward()
    cut.reduce_scalars()
    found = []
    for name, parameter in whole.named_parameters():
        grad, box = cut.tensors[f"0.{name}"].grad, cut.map[f"0.{name}"].box
        assert isinstance(grad, DTensor) and parameter.grad is not None
        found.append(float((grad._local_tensor - parameter.grad[box.place(tuple(parameter.shape))] / 4).abs().max()))
    return max(found)


@pytest.mark.distributed
def test_of_those_who_share_experts_one_may_get_no_token(pool: Pools) -> None:
    assert max(pool(4).run(spared)) < 1e-13


def starved_of_users(layout: Layout, kind: type[Experts], below: bool) -> float:
    """In a worker: the largest error of a gradient, where no token goes to the second half of the experts.

    `below`: whether what is below the experts learns, so that their tokens need gradients.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = MixtureOfExperts(6, 3, num_experts=4, top_k=2)
        layer.experts = kind(4, 6, 3)
        layer.router.bias.copy_(torch.tensor([5.0, 5.0, 0.0, 0.0]))
        return nn.Sequential(nn.Linear(6, 6).requires_grad_(below), layer, nn.Linear(6, 6))

    whole, cut = make().double(), spread(make, layout, "float64")
    value = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    for module in (whole, cut.modules[""]):
        module(value).square().sum().backward()
    cut.reduce_scalars()
    found = []
    for name, parameter in whole.named_parameters():
        grad, box = cut.tensors[name].grad, cut.map[name].box
        local = grad._local_tensor if isinstance(grad, DTensor) else grad
        if parameter.grad is None:
            assert local is None, name
        else:
            assert local is not None, name
            found.append((local - parameter.grad[box.place(tuple(parameter.shape))]).abs().sum())
    return float(sum(found))


@pytest.mark.distributed
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("kind", [Sparing, Fresh])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(Layout(dp_replicate=2, ep=2), 2), (Layout(dp_shard=2, ep=2), 2), (Layout(dp_shard=4, ep=2), 4)],
    ids=str,
)
def test_a_backward_passes_experts_that_make_nothing_of_no_tokens(
    pool: Pools, layout: Layout, world_size: int, kind: type[Experts], below: bool
) -> None:
    """The other ranks wait for it in both exchanges."""
    assert max(pool(world_size).run(starved_of_users, layout, kind, below, timeout=20)) < 1e-12


def entered(layout: Layout) -> tuple[str, ...]:
    found = spread(build, layout, "float64")
    found.modules[""](X).sum().backward()
    return found.path.take()


@pytest.mark.distributed
def test_what_all_ranks_exchange_is_noted_and_compared(pool: Pools) -> None:
    """Not what a few of them do: groups with samples of their own may each go their own way."""
    assert pool(2).run(entered, Layout(dp_replicate=2, ep=2)) == [("the experts experts",)] * 2
    assert pool(4).run(entered, Layout(dp_replicate=4, ep=2)) == [()] * 4


@pytest.mark.distributed
def test_who_enters_sharded_experts_is_noted_and_compared(pool: Pools) -> None:
    """And whose gradients they reduce."""
    for told in pool(4).run(entered, Layout(dp_shard=4, ep=2)):
        assert "experts" in told and "the gradients of experts" in told
