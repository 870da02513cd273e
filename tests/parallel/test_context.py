"""The user's module runs as it is, on this rank's positions; only attention means the whole sequence."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.batchnorm import Mode
from allranks.parallel.context import _TORCHS_OWN, Context
from allranks.parallel.sequences import Share
from allranks.task import Task
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread

pytestmark = pytest.mark.distributed

SEQ = 8
WHOLE = torch.arange(2 * SEQ * 4, dtype=torch.float64).view(2, SEQ, 4).sin()


class Mixing(nn.Module):
    """Attention between two linear layers; notes which positions it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(4, 4)
        self.told: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0, positions: torch.Tensor | None = None) -> torch.Tensor:
        self.told = positions
        query, key, value = (p.unflatten(-1, (2, 2)).transpose(1, 2) for p in (self.up(x) * scale).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: torch.Tensor = self.down(mixed.transpose(1, 2).flatten(-2))
        return found


class Identified(Mixing):
    """What Hugging Face calls them."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, positions=position_ids)


def whole_output() -> torch.Tensor:
    torch.manual_seed(0)
    found: torch.Tensor = Mixing().double()(WHOLE)
    return found


def run(kind: Any, build: Any, *args: Any) -> tuple[bool, list[int], list[int], bool]:
    """Whether the output is the whole's, the positions told and their shape, whether torch's own function is back."""
    expected = whole_output()
    found = spread(build, Layout(cp=2, context=kind), "float64")
    assert found.context is not None
    found.context.meet({"x": WHOLE}, (WHOLE,), {})
    mine = found.context.cut({"x": WHOLE})["x"]
    output = found.modules[""](mine, *args)
    told = found.bare().told
    assert isinstance(told, torch.Tensor)
    query = torch.ones(1, 1, 3, 2)
    alone = functional.scaled_dot_product_attention(query, query, query).shape == query.shape
    right = torch.allclose(output, found.context.share.take(expected, 1), rtol=1e-13)
    return right, told.flatten().tolist(), list(told.shape), alone


@pytest.mark.parametrize(
    ("kind", "places"), [("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("ring", [[0, 1, 6, 7], [2, 3, 4, 5]])]
)
@pytest.mark.parametrize("build", [Mixing, Identified])
def test_a_module_computes_with_its_positions(pool: Pools, kind: str, places: list[list[int]], build: Any) -> None:
    shape = [4] if build is Mixing else [1, 4]
    expected = [(True, own, shape, True) for own in places]
    assert pool(2).run(run, kind, build) == expected
    if build is Mixing:
        assert pool(2).run(run, kind, build, 1.0) == pool(2).run(run, kind, build, 1.0, None) == expected


class Checkpointing(Mixing):
    """Its attention is computed again in the backward, by the model's own code."""

    reentrant = False

    def forward(self, x: torch.Tensor, scale: float = 1.0, positions: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().forward, x, scale, positions, use_reentrant=self.reentrant)
        return found


class Reentrant(Checkpointing):
    reentrant = True


def learn(kind: Any, build: Any) -> bool:
    """Whether the gradients of both parts together are those of the whole."""
    torch.manual_seed(0)
    alone = Mixing().double()
    alone(WHOLE).square().sum().backward()
    found = spread(build, Layout(cp=2, context=kind), "float64")
    assert found.context is not None
    found.context.meet({"x": WHOLE}, (WHOLE,), {})
    mine = found.context.cut({"x": WHOLE})["x"].requires_grad_()
    found.bare()(mine).square().sum().backward()
    right = []
    for own, whole in zip(found.bare().parameters(), alone.parameters(), strict=True):
        assert own.grad is not None and whole.grad is not None
        dist.all_reduce(own.grad)
        right.append(torch.allclose(own.grad, whole.grad, rtol=1e-10))
    return all(right)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize("build", [Mixing, Checkpointing, Reentrant])
def test_what_the_model_checkpoints_attends_to_whole_sequences_again(pool: Pools, kind: str, build: Any) -> None:
    assert pool(2).run(learn, kind, build) == [True, True]


class Again(torch.autograd.Function):
    """A checkpoint that somebody has written: its second run has no context."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(ctx.saved_tensors[0].detach()), gradient)
        return None, None


class Foreign(Mixing):
    def forward(self, x: torch.Tensor, scale: float = 1.0, positions: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = Again.apply(super().forward, x)  # type: ignore[no-untyped-call]
        return found


def learn_again() -> str:
    with pytest.raises(LayoutError) as raised:
        learn("ulysses", Foreign)
    return str(raised.value)


def test_attention_that_other_code_computes_again_is_refused(pool: Pools) -> None:
    (told, other) = pool(2).run(learn_again)
    assert told == other and "in the backward by other code than torch.utils.checkpoint" in told


def told_by_the_caller() -> tuple[list[int], list[str]]:
    found = spread(Mixing, Layout(cp=2))
    assert found.context is not None
    found.modules[""](WHOLE[:, :4].float(), positions=torch.tensor([9, 9]))
    told = found.bare().told
    assert isinstance(told, torch.Tensor)
    return told.tolist(), list(inspect.signature(found.bare().forward).parameters)


def test_positions_that_are_given_stay(pool: Pools) -> None:
    """And the module says of itself what it said before."""
    assert pool(2).run(told_by_the_caller) == [([9, 9], ["x", "scale", "positions"])] * 2


def copied() -> bool:
    found = spread(Mixing, Layout(cp=2), "float64")
    assert found.context is not None
    found.context.meet({"x": WHOLE}, (WHOLE,), {})
    mine = found.context.cut({"x": WHOLE})["x"]
    twin = copy.deepcopy(found.bare())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    return bool((twin(mine) == 0).all()) and not bool((found.bare()(mine) == 0).all())


def test_a_copy_of_the_model_computes_with_its_own_weights(pool: Pools) -> None:
    assert pool(2).run(copied) == [True, True]


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5)


def draw() -> list[float]:
    module = nn.Sequential(nn.Linear(4, 4), Dropping())
    found = spread(lambda: module, Layout(cp=2))
    torch.manual_seed(7)
    mask: list[float] = (found.bare()(torch.ones(1, 64, 4)) == 0).float().flatten().tolist()
    torch.manual_seed(7)
    again = (found.bare()(torch.ones(1, 64, 4)) == 0).float().flatten().tolist()
    assert again == mask
    return mask


def test_each_rank_draws_numbers_of_its_own(pool: Pools) -> None:
    one, other = pool(2).run(draw)
    assert one != other
    assert all(abs(sum(mask) / len(mask) - 0.5) < 0.15 for mask in (one, other))


def autocast(kind: Any) -> str:
    found = spread(Mixing, Layout(cp=2, context=kind))
    assert found.context is not None
    seen = []
    attend = Context.attend

    def watch(self: Context, call: Any) -> torch.Tensor:
        seen.append(attend(self, call))
        return seen[0]

    Context.attend = watch  # type: ignore[method-assign]
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found.context.meet({"x": WHOLE}, (WHOLE,), {})
            mine = found.context.cut({"x": WHOLE})["x"].float()
            # What it is multiplied by is wider, as a rotary table may be.
            found.modules[""](mine, torch.ones(12)).sum().backward()
    finally:
        Context.attend = attend  # type: ignore[method-assign]
    return str(seen[0].dtype)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_attention_runs_in_autocasts_type(pool: Pools, kind: str) -> None:
    assert pool(2).run(autocast, kind) == ["torch.bfloat16"] * 2


@pytest.mark.parametrize("mode", ["local", "broadcast"])
def test_batch_statistics_of_each_ranks_own_samples_are_refused(pool: Pools, mode: Mode) -> None:
    def case() -> None:
        spread(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Layout(cp=2, batchnorm=mode))

    with pytest.raises(LayoutError, match=f"layout.batchnorm={mode} takes each rank's own samples, and cp=2 gives it"):
        pool(2).run(case)


def test_without_cp_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", _TORCHS_OWN)  # whatever ran here before
    found = spread(Mixing)
    assert found.context is None
    assert functional.scaled_dot_product_attention is _TORCHS_OWN
    assert "forward" not in vars(found.bare())


def describe() -> list[str]:
    found = spread(Mixing, Layout(cp=2, context="ring"))
    assert found.context is not None
    said = found.context.meet({"x": WHOLE, "n": 1}, (WHOLE,), Task.hints(Task.__new__(Task)).sequence_dims)
    assert found.context.share == Share(dist.get_rank(), 2, balanced=True)
    return [str(decision) for decision in (*found.decisions, said)]


def test_it_is_said(pool: Pools) -> None:
    ring, cut = pool(2).run(describe)[0]
    assert ring.startswith("attention joins the positions of 2 processes, because layout.context=ring: keys and values")
    assert cut.startswith("each sequence is cut over cp=2: x, because they have the 8 positions")


def enter_optional() -> tuple[str, str]:
    """In a worker: what attention says in the second of two modules, of which the forward may leave out that one."""
    found = spread(lambda: nn.Sequential(Mixing(), Mixing()), Layout(cp=2), "float64", optional=["1"])
    assert found.context is not None
    found.context.meet({"x": WHOLE}, (WHOLE,), {})
    mine = found.context.cut({"x": WHOLE})["x"]
    found.bare().get_submodule("0")(mine)  # outside of the model's forward attention is torch's own
    said = []
    for module in (found.modules[""], copy.deepcopy(found.bare())):
        try:
            module(mine)
        except LayoutError as error:
            said.append(str(error))
    first, second = said
    return first, second


def test_attention_in_what_a_forward_may_leave_out_is_refused(pool: Pools) -> None:
    words = (
        "hints().optional: a forward may leave out 1, and cp=2 ranks attend to each other's positions in it together: "
        "leave cp out, or take 1 out of hints().optional and have every forward enter it"
    )
    assert pool(2).run(enter_optional) == [(words, words)] * 2
