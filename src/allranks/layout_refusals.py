"""What of a Layout does not go together, beyond its degrees: a reason for each."""

from importlib.util import find_spec

from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout
from allranks.layout_placement import refuse_beside_placement

FLOAT8_EXTRA = (
    "train.precision=float8 needs torchao, which is not installed: pip install 'torchao>=0.18', or take "
    "train.precision=bfloat16"
)
SPLIT_BACKWARD = ("interleaved_zb", "zbv", "dualpipev")


def refuse_unsupported(layout: Layout) -> None:
    """Raise LayoutError for modes that do not go together, or with the degrees."""
    _check_offload(layout)
    _check_schedule(layout)
    _check_recompute(layout)
    if layout.prefetch is not None and layout.pp > 1:
        raise LayoutError(
            f"layout.prefetch={layout.prefetch} gathers in the order of the model, and under pp={layout.pp} "
            "micro-steps take turns in it: leave prefetch out"
        )
    if layout.kind == "placement":
        refuse_beside_placement(dict(layout.differing()))


def refuse_float8(layout: Layout) -> None:
    """As `refuse_beside_float8`; raise ConfigError without torchao, too."""
    refuse_beside_float8(layout)
    if find_spec("torchao") is None:
        raise ConfigError(FLOAT8_EXTRA)


def refuse_beside_float8(layout: Layout) -> None:
    """Raise LayoutError for layouts that `train.precision=float8` does not go with."""
    axes = [f"{axis}={getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1]
    beside = axes or [layout.kind] * (layout.kind in ("placement", "data_parallel"))
    if beside:
        parts = "not made (each part of a layer would scale by its own largest value)"
        why = parts if layout.tp > 1 else "not made or tested"
        raise LayoutError(
            f"train.precision=float8 with {' and '.join(beside)} is {why}: use ddp, fsdp or hsdp, or "
            "train.precision=bfloat16"
        )


def _check_offload(layout: Layout) -> None:
    """What parameters in the host's memory do not go with."""
    if not layout.offloads_parameters:
        return
    if layout.kind == "single":
        raise LayoutError(
            f"offload={layout.offload} keeps the shards of parameters in the host's memory, and one process has nobody "
            "to share them with: use recompute=full, offload=activations (on a GPU) or a smaller micro-batch, or start "
            "more processes on more devices"
        )
    if layout.dp_shard == 1 or not layout.fully_sharded:
        raise LayoutError(
            f"offload={layout.offload} keeps the shards of parameters in the host's memory, and this layout shards "
            "none (dp_shard above 1, with sharding=full or grad_op): use fsdp, or offload=activations"
        )
    if layout.local_sgd is not None:
        raise LayoutError(
            f"offload={layout.offload} with layout.local_sgd is not made (the copies exchange parameters where they "
            "lie, which would be the host's memory): leave one of them"
        )


def _check_recompute(layout: Layout) -> None:
    if layout.recompute == "budget" and layout.compile == "none":
        raise LayoutError("recompute=budget leaves the choice to torch.compile: add compile=block")
    talking = [f"{axis}={getattr(layout, axis)}" for axis in ("tp", "cp", "ep") if getattr(layout, axis) > 1]
    if talking and (layout.recompute, layout.compile) == ("selective", "block"):
        raise LayoutError(
            "recompute=selective with compile=block takes a block in one piece, and under "
            f"{' and '.join(talking)} ranks exchange inside of one: use recompute=full, or leave compile out"
        )


def _check_schedule(layout: Layout) -> None:
    """What the schedules cannot follow that run the halves of a backward apart."""
    beside = [f"{axis}={getattr(layout, axis)}" for axis in ("tp", "cp", "dp_shard") if getattr(layout, axis) > 1]
    # Compiled code gives away in one backward what the second half would need, or finds in a cache code that does.
    beside += [f"{mode}={given}" for mode in ("recompute", "compile") if (given := getattr(layout, mode)) != "none"]
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD and beside:
        raise LayoutError(
            f"schedule={layout.schedule} runs the halves of a backward apart, which {' and '.join(beside)} cannot "
            "follow: use schedule=1f1b or interleaved"
        )
