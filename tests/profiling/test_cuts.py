"""How a plan for layers becomes cuts of kernels."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.profiling.cuts import find_cuts, owner
from tests.profiling.recordings import observe

WIDTH = 8


class Mixed(nn.Module):
    """A norm, attention with two projections in one, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.into(self.norm(x)).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)
        found: torch.Tensor = self.after(functional.gelu(x + self.out(mixed)))
        return found


PLAN = {"norm": "sequence", "into": "colwise", "out": "rowwise", "after": "replicate"}


def cuts_of(make: Any, shape: tuple[int, ...], **known: Any) -> list[tuple[str, str]]:
    """(kernel, cut) of the forward's kernels that compute anything."""
    structure, (seen,) = observe(make, shape, **known)
    calls = seen.recording.calls
    found = find_cuts(calls, structure)
    assert all(not cut for call, cut in zip(calls, found, strict=True) if call.backward)
    asked = ("native_layer_norm", "addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu", "gelu", "add", "relu")
    return [
        (c.op.removeprefix("_")[:10], cut)
        for c, cut in zip(calls, found, strict=True)
        if c.op in asked and not c.backward
    ]


def test_cuts_are_followed_along_the_data() -> None:
    assert cuts_of(Mixed, (2, 5, WIDTH), styles=PLAN) == [
        ("native_lay", "sequence"),
        ("addmm", "column"),
        ("scaled_dot", "heads"),
        ("addmm", "row"),
        ("add", "sequence"),
        ("gelu", "sequence"),
        ("addmm", ""),
    ]


def test_without_cuts_along_the_sequence_what_follows_is_whole() -> None:
    plan = {name: style for name, style in PLAN.items() if style != "sequence"}
    cuts = dict(cuts_of(Mixed, (2, 5, WIDTH), styles=plan))
    assert (cuts["native_lay"], cuts["gelu"], cuts["scaled_dot"]) == ("", "", "heads")


def test_without_a_plan_nothing_is_cut() -> None:
    assert {cut for _, cut in cuts_of(Mixed, (2, 5, WIDTH))} == {""}


def test_activations_between_two_cut_layers_are_cut_by_features() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    found = cuts_of(make, (2, WIDTH), styles={"0": "colwise", "2": "rowwise"})
    assert found == [("addmm", "column"), ("relu", "column"), ("addmm", "row")]


def test_torchs_own_attention_and_experts() -> None:
    def encoder() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)

    styles = {"self_attn": "heads", "linear1": "colwise", "linear2": "rowwise"}
    products = [cut for name, cut in cuts_of(encoder, (2, 5, WIDTH), styles=styles) if name in ("mm", "addmm")]
    assert products == ["column", "row", "column", "row"]
    assert ("scaled_dot", "heads") in cuts_of(encoder, (2, 5, WIDTH), styles=styles)
    experts = cuts_of(lambda: nn.Sequential(nn.Linear(WIDTH, 4)), (2, WIDTH), experts={"0": 4})
    assert experts == [("addmm", "expert")]


def test_vocabularies() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, WIDTH)
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.table(x.long()))
            return found

    structure, (seen,) = observe(Table, (2, 3), styles={"table": "vocab", "head": "vocab"})
    found = find_cuts(seen.recording.calls, structure)
    cuts = {call.op: cut for call, cut in zip(seen.recording.calls, found, strict=True) if call.parameters and cut}
    assert cuts == {"embedding": "vocab", "addmm": "vocab"}


@pytest.mark.parametrize(("loss_parallel", "cut"), [(False, ""), (True, "column")])
def test_logits_are_whole_again_unless_the_loss_is_parallel(loss_parallel: bool, cut: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.GELU())

    known: Any = {"styles": {"0": "sequence", "1": "vocab"}, "loss_parallel": loss_parallel}
    found = cuts_of(make, (2, WIDTH), **known)
    assert found == [("native_lay", "sequence"), ("addmm", "vocab"), ("gelu", cut)]


def test_a_call_belongs_to_the_module_of_its_parameters() -> None:
    structure, (seen,) = observe(lambda: nn.Sequential(nn.Linear(WIDTH, 4)), (2, WIDTH))
    (product,) = [call for call in seen.recording.calls if call.op == "addmm"]
    assert owner(product) == "0"
    product.modules = ("",)
    assert owner(product) == "0"
    product.modules, product.parameters = ("",), ()
    assert owner(product) == ""
    assert structure.name == "Small"
