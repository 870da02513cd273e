"""What a dry run cannot say, and says so in one line instead of a guess."""

import contextlib
import re
from collections.abc import Iterator

from allranks.cluster import Device
from allranks.config_sections import LayoutConfig
from allranks.errors import AllranksError, ConfigError, LayoutError, TaskError
from allranks.layout import Layout
from allranks.model_shape import ModelShape
from allranks.profiling.fakes import advise_values, needs_values, what_failed
from allranks.rehearsing.places import UPDATE
from allranks.users_code import user_line, user_place

_LACKS_CUDA = re.compile(
    "not linked with support for cuda|compiled with CUDA|NVIDIA driver|CUDA GPUs|requires CUDA support"
    "|Cannot access accelerator device|Cannot get CUDA generator|no attribute '_cuda_|CUDA driver|CUDA-capable device",
    re.IGNORECASE,
)
"""What torch says, built without CUDA or where no GPU is, to code that names one."""
_OF_ANY_RANK = "sourceRank() may only be called"
"""What it says where `dist.recv` without a source returns the rank that it took from."""
_NAMES_SHARDS = re.compile("DTensor|sharding strategy|sharding propagation", re.IGNORECASE)
"""What it says to code that does with a shard what only a plain tensor can."""


class Unrehearsable(TaskError):
    """The step needs values, or operators without a kernel for shapes: nothing is known of it."""


class NotRehearsed(LayoutError):
    """Training takes the layout, and a dry run of it would tell nothing, or something else."""


def explain(name: str, error: Exception, module: str, layout: Layout, *, on_cuda: bool = False) -> TaskError:
    """The error for what a rehearsed step raised: a fault that training would meet, or a question of values.

    Args:
        module: in which it was raised, or another place (`places`).
        on_cuda: whether the processor's tensors stand for a GPU's, which code that names the GPU does not know.
    """
    what = what_failed(error, module)
    unknown = _unrehearsable(name, error, what, on_cuda=on_cuda)
    return unknown or TaskError(f"a step of {name} under {layout} would fail: {what}; {_advise(layout, error, module)}")


@contextlib.contextmanager
def starting(name: str, *, on_cuda: bool = False) -> Iterator[None]:
    """Turn what the user's model(), dataset(), items or optimizer() raise before the first step into one line.

    Raises:
        TaskError: training would meet it, too; Unrehearsable: it asks for values.
    """
    try:
        yield
    except AllranksError:
        raise
    except SystemExit as error:
        raise TaskError(f"{name} cannot start:\n{user_line(error)}") from error
    except Exception as error:
        if not user_place(error):
            raise  # a fault of ours, which a traceback tells better
        what = what_failed(error, "")
        unknown = _unrehearsable(name, error, what, on_cuda=on_cuda)
        raise unknown or TaskError(f"{name} cannot start: {what}; mend it there: training calls it, too") from error


def _unrehearsable(name: str, error: Exception, what: str, *, on_cuda: bool) -> Unrehearsable | None:
    if on_cuda and _names_cuda(error):
        return Unrehearsable(
            f"{name} cannot be rehearsed: {what}; here the GPU's tensors are a processor's: take the device from one "
            "of them (device=x.device) instead of its name"
        )
    if _OF_ANY_RANK in str(error):
        return Unrehearsable(
            f"{name} cannot be rehearsed: {what}; from which rank a receive takes is known only where it runs: name "
            "the rank (src=...)"
        )
    if needs_values(error):
        advice = advise_values(error)
        return Unrehearsable(f"{name} cannot be rehearsed: {what}{f'; {advice}' if advice else ''}")
    return None


def _names_cuda(error: Exception) -> bool:
    """Whether it raised because the user's code names the GPU."""
    apart = re.search(r"found (at least two|two different) devices.*\bcuda\b", str(error))  # torch 2.13, 2.11
    return apart is not None or _LACKS_CUDA.search(str(error)) is not None


def _advise(layout: Layout, error: Exception, module: str) -> str:
    if layout.fully_sharded and _NAMES_SHARDS.search(str(error)):
        return (
            "FSDP's parameters and their gradients are DTensors: take full_tensor() of them there (to_local() is this "
            f"rank's part), or {_unsharded(layout)}, where they are plain"
        )
    if module == UPDATE and layout.dp_shard > 1:
        return f"see whether it runs with {_unsharded(layout)}, whose update has whole parameters"
    if layout.tp > 1 and module != UPDATE:
        return f"with tp={layout.tp} each rank has a part of the channels: take a tp that divides the number of heads"
    if layout.cuts_model:
        return "see whether it runs with --layout single, which has the whole model"
    return "mend it there: it fails on one process, too"


def _unsharded(layout: Layout) -> str:
    """The layout to take where no rank may have parts of parameters."""
    return "--layout single" if layout.cuts_model else "--layout ddp"


def refuse(layout: LayoutConfig, precision: str, device: Device | None = None) -> None:
    """NotRehearsed for what has no rehearsal; ConfigError for float8 on a GPU that has no such kernels.

    Args:
        layout: as it was written: what training says of it, in this world, would only lead to this refusal.
    """
    if device is not None and device.kind == "cuda" and precision == "float8" and precision not in device.peak_flops:
        raise ConfigError(
            f"train.precision=float8 needs a GPU that multiplies in eight bits, and {device.name} does not: take "
            "train.precision=bfloat16, or another --cluster"
        )
    lacks, planned = "tensors without memory have no", "`allranks plan` estimates it"
    # The planner, too, counts one device a process.
    several = f"{lacks} devices of one process; rehearse a layout with a process for each device: fsdp, or pp=N"
    reasons = {
        "placement": (layout.placed, several),
        "data_parallel": (layout.kind == "data_parallel", several),
        f"ddp_hook={layout.ddp_hook}": (layout.ddp_hook != "none", f"{lacks} hooks of DDP's reducer; {planned}"),
        "recompute=budget": (
            layout.recompute == "budget",
            "torch.compile chooses what is kept, and compiles nothing beneath what watches the memory of a rehearsed "
            "step; rehearse recompute=none and recompute=full, between which it lies",
        ),
        f"local_sgd={layout.local_sgd}": (
            layout.local_sgd is not None,
            f"{lacks} step that is like all others; {planned}",
        ),
    }
    for what, (asked, because) in reasons.items():
        if asked:
            raise NotRehearsed(f"{what} is not rehearsed: {because}")


def refuse_stages(shape: ModelShape, layout: Layout) -> None:
    """LayoutError for a pipeline of more stages than a known model has blocks, at which its stages begin."""
    stages = layout.num_stages
    if layout.pp == 1 or stages <= shape.layers:
        return
    most = shape.layers // (stages // layout.pp)
    written = f"pp={layout.pp}" if stages == layout.pp else f"pp={layout.pp} with schedule={layout.schedule}"
    raise LayoutError(
        f"{written} makes {stages} stages, each of which begins at a block, and {shape.name} has {shape.layers}: "
        + (f"pp can be {most} at most" if most > 1 else "take a layout without pp")
    )
