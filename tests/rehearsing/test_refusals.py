"""What cannot be rehearsed says so in one line, and what would fail says where."""

import io
import logging
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.config_sections import LayoutConfig
from allranks.errors import ConfigError, LayoutError, TaskError
from allranks.layout import Layout
from allranks.named_models import find_model
from allranks.planning.hardware import find_cluster
from allranks.rehearsing.refusals import NotRehearsed, Unrehearsable, explain, refuse, refuse_stages
from tests.profiling.subjects import AskingPart
from tests.rehearsing.tasks import Calling, Layered, rehearsed

PLANNED = "`allranks plan` estimates it"
APART = "rehearse a layout with a process for each device: fsdp, or pp=N"


@pytest.mark.parametrize(
    ("layout", "instead"),
    [
        (LayoutConfig(kind="placement"), APART),
        (LayoutConfig(dp_replicate=2, placement={"*": "cpu"}), APART),
        (LayoutConfig(kind="data_parallel"), APART),
        (LayoutConfig(dp_replicate=2, ddp_hook="bfloat16"), PLANNED),
        # The planner has no model of what torch chooses.
        (LayoutConfig(recompute="budget", compile="block"), "rehearse recompute=none and recompute=full"),
        (LayoutConfig(dp_replicate=2, local_sgd=8), PLANNED),
    ],
)
def test_layouts_without_a_rehearsal(layout: LayoutConfig, instead: str) -> None:
    with pytest.raises(LayoutError, match=rf"is not rehearsed: .*{instead}") as caught:
        refuse(layout, "float32")
    assert type(caught.value) is NotRehearsed and caught.value.exit_code == LayoutError.exit_code


def test_torch_compiles_nothing_beneath_what_watches_memory() -> None:
    """The reason why recompute=budget is refused. Where a newer torch compiles there, it may be rehearsed."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    compiled: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    # Two functions: what torch has once given up it does not try again.
    torch.compile(lambda value: value * 2, backend=backend)(torch.ones(2))
    assert len(compiled) == 1
    with Watch():  # type: ignore[no-untyped-call]  # torch's
        torch.compile(lambda value: value * 3, backend=backend)(torch.ones(2))
    assert len(compiled) == 1


def test_other_layouts_have_one() -> None:
    refuse(LayoutConfig(dp_shard=8, tp=8, recompute="full"), "bfloat16")
    refuse(LayoutConfig(dp_shard=2, tp=2, recompute="selective"), "float32")
    refuse(LayoutConfig(dp_shard=2, offload="all"), "float16")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(pp=64),
            "pp=64 makes 64 stages, each of which begins at a block, and llama3-8b has 32: pp can be 32 at",
        ),
        (Layout(pp=32, schedule="interleaved"), "pp=32 with schedule=interleaved makes 64 stages, .* pp can be 16 at"),
    ],
)
def test_more_stages_than_blocks(layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        refuse_stages(find_model("llama3-8b"), layout)
    with pytest.raises(LayoutError, match=r"take a layout without pp$"):
        refuse_stages(find_model("llama3-8b", layers=1), layout)
    refuse_stages(find_model("llama3-8b"), Layout(pp=32))
    refuse_stages(find_model("llama3-8b", layers=1), Layout(dp_shard=64))


def test_eight_bits_need_a_device_that_multiplies_them() -> None:
    old, new, processor = (find_cluster(name).device for name in ("8:a100-80g", "8:h100", "1x2:cpu"))
    for device in (None, new, processor):
        refuse(LayoutConfig(), "float8", device)
    with pytest.raises(ConfigError, match=r"eight bits, and a100-80g does not: take train\.precision=bfloat16"):
        refuse(LayoutConfig(), "float8", old)


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


class Whitening(torch.optim.Optimizer):
    """Multiplies each gradient by what it makes of it, a plain tensor beside it, as Shampoo does."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.how = how

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        matrices = [p for group in self.param_groups for p in group["params"] if p.dim() == 2]
        with torch.no_grad():
            for p in matrices:
                whole: Any = p.grad
                if self.how == "whole" and isinstance(whole, DTensor):
                    whole = whole.full_tensor()
                size = 3 if self.how == "unequal" else len(whole)
                found = (whole @ whole.T + torch.eye(size)) @ whole
                if not isinstance(p, DTensor):
                    p.sub_(found)


class Whitened(Layered):
    """Learns by it."""

    how: str = "mixed"

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return Whitening(parameters, self.how)


def test_an_optimizer_that_mixes_plain_tensors_with_shards_is_told_so() -> None:
    rehearsed(Whitened(), "ddp", 2)
    rehearsed(Whitened(how="whole"), "fsdp", 2)
    with pytest.raises(TaskError) as caught:
        rehearsed(Whitened(), "fsdp", 2)
    pattern = (
        r"a step of Whitened under dp_shard=2 would fail: .*DTensor.* \(in the update, test_refusals\.py:\d+\); "
        r"FSDP's parameters and their gradients are DTensors: take full_tensor\(\) of them there \(to_local\(\) is "
        r"this rank's part\), or --layout ddp, where they are plain"
    )
    assert re.fullmatch(pattern, str(caught.value))
    missing = RuntimeError("Operator aten.geqrf.default does not have a sharding strategy registered.")
    assert "take full_tensor()" in str(explain("Net", missing, "the update", Layout(dp_shard=2)))
    assert "--layout single, where" in str(explain("Net", missing, "the update", Layout(dp_shard=2, tp=2)))
    assert "full_tensor" not in str(explain("Net", missing, "the update", Layout(dp_replicate=2)))


@pytest.mark.parametrize(
    ("layout", "advice"),
    [
        ("ddp", "mend it there: it fails on one process, too"),
        ("dp_shard=2,sharding=optimizer", "see whether it runs with --layout ddp, whose update has whole parameters"),
        ("tp=2", "see whether it runs with --layout single, which has the whole model"),
    ],
)
def test_what_fails_in_the_update_is_said_to(layout: str, advice: str) -> None:
    with pytest.raises(TaskError, match=rf"\(in the update, test_refusals\.py:\d+\); {advice}$"):
        rehearsed(Whitened(how="unequal"), layout, 2)


def add_there(value: torch.Tensor) -> torch.Tensor:
    """Makes a tensor on the GPU by its name."""
    return value + torch.zeros(value.shape[-1], device="cuda")


def bring_there(value: torch.Tensor) -> torch.Tensor:
    """Brings one there."""
    return value + torch.ones(value.shape[-1]).to("cuda")


def number_it(value: torch.Tensor) -> torch.Tensor:
    """Brings it to the first GPU."""
    return value.to(0)


def draw_there(value: torch.Tensor) -> torch.Tensor:
    """Draws with a generator of the GPU."""
    return value + torch.rand(value.shape, generator=torch.Generator(device="cuda"))


class Naming(Layered):
    """Names the GPU in its middle."""

    how: str = "add"

    def middle(self) -> nn.Module:
        return Calling({"add": add_there, "bring": bring_there, "number": number_it, "draw": draw_there}[self.how])


@pytest.mark.parametrize("how", ["add", "bring", "number", "draw"])
def test_code_that_names_the_gpu_is_a_fault_only_where_there_is_none(how: str) -> None:
    # Built with CUDA, torch brings a tensor without memory there, and stops where it meets another one.
    place = r"\(in 2\)" if how == "number" and torch.version.cuda else r"test_refusals\.py:\d+\)"
    with pytest.raises(Unrehearsable, match=rf"{place}; here .*take the device from one of them"):
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


class Catches(nn.Module):
    """Goes on without what needs values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            if x.mean() > 0:
                return x * 2
        except Exception:
            logging.getLogger(__name__).debug("no mean")
        return x


class Swallows(Layered):
    """A branch on values, whose error its own code catches."""

    def middle(self) -> nn.Module:
        return Catches()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp=2"])
def test_a_question_of_values_that_is_caught_is_one_still(layout: str) -> None:
    with pytest.raises(Unrehearsable, match=r"item.* needs values.*test_refusals\.py:\d+\); choose by torch.where"):
        rehearsed(Swallows(), layout, 2)


def into_text(x: torch.Tensor) -> torch.Tensor:
    """Logs the mean."""
    logging.getLogger(__name__).debug(f"{x.detach().mean():.3f}")
    return x


def of_numbers(x: torch.Tensor) -> torch.Tensor:
    """Joins two means."""
    mean = x.detach().mean()
    return x + torch.tensor([mean, mean]).sum()


def sparse(x: torch.Tensor) -> torch.Tensor:
    """Multiplies by a sparse matrix."""
    found: torch.Tensor = torch.sparse.mm(torch.eye(x.shape[-1]).to_sparse(), x.T).T
    return found


def jagged(x: torch.Tensor) -> torch.Tensor:
    """Makes sequences of several lengths."""
    return x + torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged).values().sum()


def save(x: torch.Tensor) -> torch.Tensor:
    """Keeps what it saw."""
    torch.save(x.detach(), io.BytesIO())
    return x


class Reads(Layered):
    """Reads values in its middle, as a sound program may."""

    how: str = "text"

    def middle(self) -> nn.Module:
        readers = {"text": into_text, "numbers": of_numbers, "sparse": sparse, "jagged": jagged, "save": save}
        return Calling(readers[self.how])


@pytest.mark.parametrize("how", ["text", "numbers", "sparse", "jagged", "save"])
def test_a_reader_of_values_runs_in_training(how: str) -> None:
    """So that its dry run must not call it faulty."""
    model = Reads(how=how).model()
    assert model(torch.randn(4, 32)).shape == (4, 10)


class Items:
    """Samples, of which none can be read where `broken`."""

    def __init__(self, *, broken: bool) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.broken:
            raise KeyError("no image")
        return torch.ones(32), 3


class Unready(Layered):
    """Raises before the first step, where `how` says."""

    how: str = "model"

    def model(self) -> nn.Module:
        if self.how == "model":
            raise ValueError("no weights\nat all")
        return super().model()

    def dataset(self, split: str) -> Any:
        if self.how == "dataset":
            raise FileNotFoundError("no images")
        if self.how == "end":
            sys.exit(0)
        return Items(broken=self.how == "item") if split == "train" else None

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.how == "values":
            return torch.optim.SGD(parameters, lr=sum(float(p.detach().mean()) for p in parameters))
        return torch.optim.SGD(parameters, lr=-1.0 if self.how == "optimizer" else 0.1)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if self.how == "end of a step":
            sys.exit(0)
        return super().loss(output, batch)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("model", "ValueError: no weights"),
        ("dataset", "FileNotFoundError: no images"),
        ("item", "KeyError: 'no image'"),
        ("optimizer", "ValueError: Invalid learning rate: -1.0"),
    ],
)
def test_what_raises_before_the_first_step_is_one_line_with_its_place(how: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        rehearsed(Unready(how=how), "ddp", 2)
    assert type(caught.value) is TaskError
    pattern = rf"Unready cannot start: {said} \(test_refusals\.py:\d+\); mend it there: training calls it, too"
    assert re.fullmatch(pattern, str(caught.value))


@pytest.mark.parametrize(("how", "said"), [("end", "cannot start"), ("end of a step", "ends the process")])
def test_what_ends_the_process_does_not_say_that_it_fits(how: str, said: str) -> None:
    with pytest.raises(TaskError, match=rf"(?s)Unready {said}:\n.*test_refusals\.py.*SystemExit: 0"):
        rehearsed(Unready(how=how), "ddp", 2)


def test_values_before_the_first_step_cannot_be_rehearsed() -> None:
    with pytest.raises(Unrehearsable, match=r"Unready cannot be rehearsed: .*needs values.* \(test_refusals\.py:\d+\)"):
        rehearsed(Unready(how="values"), "ddp", 2)


def test_a_fault_of_ours_is_not_called_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's stands in its traceback, which tells it better than a line."""
    monkeypatch.setattr("allranks.rehearsing.dryrun.assemble_rank", len)
    with pytest.raises(TypeError, match="exactly one argument"):
        rehearsed(Layered(), "ddp", 2)
