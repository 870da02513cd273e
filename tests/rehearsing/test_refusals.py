"""What cannot be rehearsed says so in one line, and what would fail says where."""

import pytest
import torch
from torch import nn

from allranks.errors import ConfigError, LayoutError, TaskError
from allranks.layout import Layout
from allranks.planning.hardware import find_cluster
from allranks.rehearsing.refusals import NotRehearsed, Unrehearsable, explain, refuse
from tests.profiling.subjects import AskingPart
from tests.rehearsing.tasks import Calling, Layered, rehearsed


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(kind="placement"), Layout(kind="data_parallel")),
        *(Layout(dp_replicate=2, ddp_hook="bfloat16"), Layout(recompute="budget", compile="block")),
    ],
)
def test_layouts_without_a_rehearsal(layout: Layout) -> None:
    with pytest.raises(LayoutError, match=r"is not rehearsed: .*`allranks plan` estimates it") as caught:
        refuse(layout)
    assert type(caught.value) is NotRehearsed and caught.value.exit_code == LayoutError.exit_code


def test_other_layouts_have_one() -> None:
    refuse(Layout(dp_shard=8, tp=8, recompute="full"), "bfloat16")
    refuse(Layout(dp_shard=2, tp=2, recompute="selective"))
    refuse(Layout(dp_shard=2, offload="all"))
    with pytest.raises(LayoutError, match="float16 is not rehearsed"):
        refuse(Layout(), "float16")


def test_eight_bits_need_a_device_that_multiplies_them() -> None:
    old, new, processor = (find_cluster(name).device for name in ("8:a100-80g", "8:h100", "1x2:cpu"))
    for device in (None, new, processor):
        refuse(Layout(), "float8", device)
    with pytest.raises(ConfigError, match=r"eight bits, and a100-80g does not: take train\.precision=bfloat16"):
        refuse(Layout(), "float8", old)


def test_a_fault_and_a_question_of_values() -> None:
    fault = explain("Net", RuntimeError("mat1 and mat2"), "layers.0", Layout(tp=2))
    assert type(fault) is TaskError
    assert str(fault) == (
        "a step of Net under tp=2 would fail: RuntimeError: mat1 and mat2 (in layers.0); with tp=2 each rank has a "
        "part of the channels: take a tp that divides the number of heads"
    )
    unknown = explain("Net", RuntimeError("no fake impl registered for x::y"), "", Layout())
    assert isinstance(unknown, Unrehearsable)
    assert str(unknown) == (
        "Net cannot be rehearsed: x::y has no kernel for shapes alone; torch.library.register_fake gives it one"
    )


def add_there(value: torch.Tensor) -> torch.Tensor:
    """Makes a tensor on the GPU by its name."""
    return value + torch.zeros(value.shape[-1], device="cuda")


def bring_there(value: torch.Tensor) -> torch.Tensor:
    """Brings one there."""
    return value + torch.ones(value.shape[-1]).to("cuda")


class Naming(Layered):
    """Names the GPU in its middle."""

    how: str = "add"

    def middle(self) -> nn.Module:
        return Calling({"add": add_there, "bring": bring_there}[self.how])


@pytest.mark.parametrize("how", ["add", "bring"])
def test_code_that_names_the_gpu_is_a_fault_only_where_there_is_none(how: str) -> None:
    with pytest.raises(Unrehearsable, match=r"test_refusals\.py:\d+\); here .*take the device from one of them"):
        rehearsed(Naming(how=how), "single", 1, on_cuda=True)
    with pytest.raises(TaskError, match="it fails on one process, too") as caught:
        rehearsed(Naming(how=how), "single", 1)
    assert type(caught.value) is TaskError


class Asks(Layered):
    """Does in its middle what needs values."""

    how: str = "item"

    def middle(self) -> nn.Module:
        return AskingPart(self.how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("item", "item.*; choose by torch.where instead of a branch there, or leave the check out"),
        ("shape", "nonzero.*; keep the shape there, by torch.where or a product with the mask$"),
        ("numpy", "numpy.*; stay in torch there$"),
        ("custom", r"allranks_test::doubled has no kernel .*register_fake gives it one \(in 1, subjects.py:\d+\)$"),
    ],
)
def test_each_question_of_values_has_its_own_remedy(how: str, said: str) -> None:
    with pytest.raises(Unrehearsable, match=said):
        rehearsed(Asks(how=how), "ddp", 2)
