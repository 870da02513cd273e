"""Models and kernels without memory."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from allranks.profiling.fakes import (
    LEAVE_OUT,
    advise_values,
    build_fake,
    fake_mode,
    make_fake,
    needs_values,
    refuse,
    run_kernel,
    what_failed,
)

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


def raised(deed: Any) -> Exception:
    """What `deed` raises of a tensor without memory, 4 by 4."""
    with fake_mode(), pytest.raises(Exception) as caught:
        deed(torch.ones(4, 4))
    return caught.value


@pytest.mark.parametrize(
    ("deed", "what", "advice"),
    [
        (lambda x: f"{x.mean():.3f}", "it writes a tensor into text", LEAVE_OUT),
        (lambda x: torch.tensor([x.mean(), x.mean()]), "it makes a tensor of the numbers in others", "torch.stack"),
        (lambda x: x.to_sparse().untyped_storage(), "it makes a sparse tensor", "a dense one"),
        (lambda x: x.to_sparse_csr(), "it makes a sparse tensor", "a dense one"),
        (lambda x: torch.nested.nested_tensor([x, x[1:]], layout=torch.jagged), "as a jagged one's are", "padded"),
        (lambda x: torch.save(x, io.BytesIO()), "it saves a tensor", LEAVE_OUT),
        (pickle.dumps, "it saves a tensor", LEAVE_OUT),
        (lambda x: bytes(x.untyped_storage()), "it reads a tensor's memory", LEAVE_OUT),
        (lambda x: x.numpy(), "it leaves torch for numpy", "stay in torch"),
        (lambda x: x.pin_memory(), "aten._pin_memory", LEAVE_OUT),
        (lambda x: x.mean().item(), "aten._local_scalar_dense", "torch.where"),
        (lambda x: x.nonzero(), "aten.nonzero", "keep the shape"),
    ],
)
def test_reading_values_is_a_question_of_values(deed: Any, what: str, advice: str) -> None:
    error = raised(deed)
    assert needs_values(error)
    assert what in what_failed(error, "") and advice in advise_values(error)


@pytest.mark.parametrize(
    "deed",
    [
        lambda x: x @ torch.ones(3, 3),
        lambda x: x + torch.ones(4, device="meta"),
        lambda x: x + "text",
        lambda x: x(),
        lambda x: x.absent(),
        lambda x: x.sum(dim=x),
        torch.ones,
    ],
)
def test_what_real_tensors_would_raise_too_is_no_question_of_values(deed: Any) -> None:
    assert not needs_values(raised(deed))


def test_two_devices_are_no_question_of_values_whatever_torch_calls_its_tensors() -> None:
    said = "Unhandled FakeTensor Device Propagation for aten.add.Tensor, found two different devices cpu, cuda:0"
    assert not needs_values(RuntimeError(said))
    assert needs_values(RuntimeError("Please convert all Tensors to FakeTensors first"))


def test_torchs_lecture_on_linkers_is_left_out() -> None:
    said = "Cannot get CUDA generator without ATen_cuda library. PyTorch splits its backend into two shared libraries"
    assert what_failed(RuntimeError(said), "") == ("RuntimeError: Cannot get CUDA generator without ATen_cuda library.")
