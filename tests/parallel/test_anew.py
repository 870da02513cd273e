"""Layers whose weight is made anew in each forward: who they are, and that no cut takes them for plain ones."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from allranks.errors import LayoutError
from allranks.losses import ChunkedHead
from allranks.parallel.anew import made_anew, made_before_forward
from allranks.parallel.tensor_attention import has_feed_forward, why_not_heads
from allranks.parallel.tensor_plan import plan_tensor
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, parts_of, session_of, step_through, together
from tests.distributed.tasks import Tiny
from tests.parallel.test_tensor import outcome

Change = Callable[..., Any]


def weight_norm(module: Any, name: str = "weight") -> Any:
    """torch.nn.utils.weight_norm, without its warning that there is a newer one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module, name)


HOOKS: dict[str, Change] = {
    "spectral_norm": spectral_norm,
    "weight_norm": weight_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 2),
}
NEW: dict[str, Change] = {
    "spectral": parametrizations.spectral_norm,
    "weight": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("name", [*HOOKS, *NEW])
@pytest.mark.parametrize("layer", [nn.Linear(4, 6), nn.Embedding(4, 6)])
def test_who_makes_its_weight_anew(name: str, layer: nn.Module) -> None:
    module = (HOOKS | NEW)[name](type(layer)(4, 6))
    said = "makes its weight anew in each forward (torch.nn.utils.{})"
    hook = said.format(name)
    assert made_anew(layer) == made_before_forward(layer) == ""
    assert made_before_forward(module) == (hook if name in HOOKS else "")
    assert made_anew(module) == (hook if name in HOOKS else said.format("parametrize"))


def test_what_else_is_computed_is_found_and_what_is_absent_is_not() -> None:
    module: Any = nn.Linear(4, 6, bias=False)
    assert made_anew(module) == ""
    del module._parameters["weight"]
    module.weight = torch.ones(6, 4)
    assert made_anew(module) == "makes its weight anew in each forward"
    assert made_anew(prune.l1_unstructured(nn.Linear(4, 6), "bias", 2)).startswith("makes its bias anew")


@pytest.mark.parametrize("change", [*HOOKS.values(), *NEW.values()], ids=[*HOOKS, *NEW])
def test_no_style_cuts_it(change: Change) -> None:
    for layer, style in ((nn.Linear, "colwise"), (nn.Linear, "rowwise"), (nn.Embedding, "vocab"), (nn.Linear, "vocab")):
        model = nn.ModuleDict({"a": change(layer(4, 4)), "b": nn.Linear(4, 4)})
        with pytest.raises(LayoutError, match=f"{style} cuts parameters, and a makes its weight anew in each forward"):
            plan_tensor({"": model}, {"a": style}, 2)  # type: ignore[dict-item]
    with pytest.raises(LayoutError, match="vocab cuts parameters, and a makes its weight anew"):
        plan_tensor({"": nn.ModuleDict({"a": change(ChunkedHead(4, 4))})}, {"a": "vocab"}, 2)
    stack = nn.Sequential(change(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4))
    assert dict(plan_tensor({"": stack}, {}, 2).styles) == {"2": "colwise", "3": "rowwise"}
    stack[3] = change(stack[3])
    with pytest.raises(LayoutError, match="tp finds nothing to cut"):
        plan_tensor({"": stack}, {}, 2)
    encoder = nn.TransformerEncoderLayer(4, 2, 6)
    assert has_feed_forward(encoder)
    encoder.linear2 = change(encoder.linear2)
    assert not has_feed_forward(encoder)


def test_nor_is_attention_cut_whose_projections_are_made_anew() -> None:
    for change in (spectral_norm, weight_norm, parametrizations.spectral_norm):
        for options, name in (({}, "in_proj_weight"), ({"kdim": 6, "vdim": 6}, "k_proj_weight")):
            module = nn.MultiheadAttention(4, 2, **options)
            assert why_not_heads(module) == ""
            change(module, name)
            assert why_not_heads(module).startswith(f"makes its {name} anew in each forward")
        module = nn.MultiheadAttention(4, 2)
        change(module.out_proj)
        assert why_not_heads(module).startswith("has an out_proj that makes its weight anew in each forward")


class Between(nn.Module):
    """A pair of layers, and between them one that works on each head's own channels."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.middle = change(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.middle(self.up(x).unflatten(-1, (-1, 2))).flatten(-2))
        return found


X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
PAIR = {"up": "colwise", "down": "rowwise"}


def between(change: Change, hints: Any) -> tuple[float, float] | str:
    """In a worker: the largest differences of output and gradients from the whole model; or the refusal."""
    try:
        output, gradients, _ = outcome(lambda: Between(change), hints, X)
    except LayoutError as error:
        return str(error)
    return float(output), float(gradients)


@pytest.mark.distributed
@pytest.mark.parametrize("middle", ["unplanned", "part"])
def test_between_cut_layers_a_hook_is_refused_and_a_property_is_right(pool: Pools, middle: str) -> None:
    """A hook computes before gradients are summed over tp: the ranks' copies would part."""
    hints = PAIR | ({"middle": "part"} if middle == "part" else {})
    found = pool(2).run(between, weight_norm, hints)
    assert all("makes its weight anew in each forward (torch.nn.utils.weight_norm)" in one for one in found)
    for output, gradients in pool(2).run(between, parametrizations.weight_norm, hints):
        assert output < 1e-12 and gradients < 1e-12


def stack() -> nn.Module:
    first, second = spectral_norm(nn.Linear(4, 8, bias=False)), nn.Linear(8, 4, bias=False)
    return nn.Sequential(first, nn.ReLU(), second, nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.distributed
def test_such_a_layer_stays_whole_and_right_beside_cut_ones(pool: Pools) -> None:
    """Half cut, a pair without biases gave twice its output over two ranks, and all ranks the same."""
    for output, gradients, held in pool(2).run(outcome, stack, {}, X):
        assert output < 1e-12 and gradients < 1e-12 and held < 1


class Normed(Tiny):
    """Blocks with a weight norm of either kind, or spectral norm."""

    change: Change = staticmethod(weight_norm)

    def model(self) -> nn.Module:
        blocks = (nn.Sequential(type(self).change(nn.Linear(7, 7)), nn.Tanh()) for _ in range(2))
        return nn.Sequential(nn.Linear(5, 7), *blocks, nn.Linear(7, 3))


def trained(change: Change, layout: str) -> Any:
    """In a worker: what it holds after two steps."""

    class Changed(Normed):
        pass

    Changed.change = staticmethod(change)
    session = session_of(Changed(), config_of(layout, *SGD, "train.global_batch=8", "train.micro_steps=2"))
    list(step_through(session, 2))
    return parts_of(session)


@pytest.mark.distributed
@pytest.mark.parametrize("change", [weight_norm, spectral_norm], ids=["weight_norm", "spectral_norm"])
def test_a_pipeline_takes_what_a_hook_makes(pool: Pools, change: Change) -> None:
    """torch copies no tensor that has a history; the copies without memory, whose calls give shapes, are made."""
    alone, found = (together(pool(n).run(trained, change, layout)) for n, layout in ((1, "single"), (2, "pp=2")))
    assert alone.keys() == found.keys()
    for name, value in alone.items():
        assert torch.allclose(value, found[name], rtol=1e-12, atol=1e-13), name
