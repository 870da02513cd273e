"""Models and kernels without memory."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from allranks.profiling.fakes import build_fake, fake_mode, make_fake, refuse, run_kernel

ATEN = torch.ops.aten
BEFORE = nn.Linear(3, 3)


def test_a_model_is_built_without_memory() -> None:
    built, decisions = build_fake(lambda: nn.Linear(1 << 20, 1 << 20), fake_mode())
    assert isinstance(built, nn.Linear)
    assert isinstance(built.weight, FakeTensor)
    assert isinstance(built.weight, nn.Parameter)
    assert not decisions


def reads_a_value() -> nn.Module:
    return nn.Linear(3, 4 + int(torch.rand(()).item()))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (reads_a_value, "building it without memory raised DataDependentOutputException"),
        (lambda: nn.Sequential(BEFORE), "it brings tensors that were made before, with their memory"),
    ],
)
def test_what_cannot_be_built_so_is_built_in_full_and_said(build: Any, why: str) -> None:
    built, (decision,) = build_fake(build, fake_mode())
    assert all(isinstance(p, FakeTensor) for p in built.parameters())  # type: ignore[union-attr]
    assert str(decision).startswith(f"model() is built in full to be traced, because {why}")
    assert not isinstance(BEFORE.weight, FakeTensor)


def test_views_of_a_deep_copy_share_its_memory() -> None:
    """Those of torch's own deep copies of fake tensors do not."""

    def build() -> nn.Module:
        first = nn.Linear(3, 4)
        first.register_buffer("table", torch.zeros(2, 2))
        tied = nn.ModuleList([first, first])
        return nn.ModuleList([tied, copy.deepcopy(tied)])

    mode = fake_mode()
    built, decisions = build_fake(build, mode)
    assert not decisions
    assert isinstance(built, nn.ModuleList)
    original, copied = built[0][0], built[1][0]  # type: ignore[index]
    with mode:
        for tensor in (copied.weight, copied.bias, copied.table):
            assert tensor.untyped_storage()._cdata == tensor.view(-1).untyped_storage()._cdata
    assert built[1][1].weight is copied.weight  # type: ignore[index]
    assert isinstance(copied.weight, nn.Parameter)
    assert not isinstance(copied.table, nn.Parameter)
    assert copied.weight is not original.weight
    assert copied.weight.requires_grad


def test_a_batch_keeps_what_is_no_tensor() -> None:
    made = make_fake(fake_mode(), {"x": torch.zeros(2, 3), "name": ["a", 1]})
    assert isinstance(made["x"], FakeTensor)
    assert (made["x"].shape, made["name"]) == ((2, 3), ["a", 1])


def same_shapes(func: Any, *args: Any) -> None:
    """Real and fake tensors give the same shapes and types."""
    real = run_kernel(func, args, {})
    mode = fake_mode()
    with mode:
        fake = run_kernel(func, tuple(make_fake(mode, list(args))), {})
    pairs = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for one, other in pairs:
        assert isinstance(other, FakeTensor)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_products_of_groups(kind: torch.dtype) -> None:
    ends = torch.tensor([3, 8], dtype=torch.int32)
    same_shapes(ATEN._grouped_mm.default, torch.zeros(8, 16, dtype=kind), torch.zeros(2, 16, 32, dtype=kind), ends)
    columns = torch.zeros(8, 16, dtype=kind).t()
    same_shapes(ATEN._grouped_mm.default, columns, torch.zeros(8, 32, dtype=kind), ends)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_statistics_of_a_norm_have_the_weights_type(kind: torch.dtype) -> None:
    images, weight = torch.ones(2, 6, 4, dtype=torch.bfloat16), torch.ones(6, dtype=kind)
    same_shapes(ATEN.native_layer_norm.default, images.transpose(1, 2).contiguous(), [6], weight, weight, 1e-5)
    same_shapes(ATEN.native_group_norm.default, images, weight, weight, 2, 6, 4, 3, 1e-5)
    mean = torch.ones(6, dtype=kind)
    same_shapes(ATEN._native_batch_norm_legit.default, images, weight, weight, mean, mean.clone(), True, 0.1, 1e-5)


def test_an_error_is_one_line_with_its_place() -> None:
    error = refuse("Words", "layers.0", ValueError("sizes do not match\nsecond line"))
    assert str(error).startswith(
        "Words cannot be traced: ValueError: sizes do not match (in layers.0); `allranks plan --measured`"
    )
    assert str(refuse("Words", "", ValueError(""))).startswith(
        "Words cannot be traced: ValueError: ; `allranks plan --measured`"
    )
