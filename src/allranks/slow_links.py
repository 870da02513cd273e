"""What makes the copies of a model send each other less, and with what it does not go."""

from allranks.config import Config
from allranks.errors import LayoutError
from allranks.layout import Layout


def check_slow_links(config: Config, layout: Layout) -> None:
    """Refuse a `layout.ddp_hook` or `layout.local_sgd` that has nothing to do, or cannot do it. Raises LayoutError."""
    if layout.local_sgd is not None:
        _check_local_sgd(config, layout, layout.local_sgd)
    if layout.ddp_hook != "none":
        _check_hook(config, layout)


def _check_local_sgd(config: Config, layout: Layout, every: int) -> None:
    given = f"layout.local_sgd={every}"
    if layout.sharding == "none":
        raise LayoutError(f"{given} leaves copies by themselves, and sharding=none keeps them together: leave one out")
    if layout.dp_replicate == 1:
        raise LayoutError(f"{given} puts the copies of dp_replicate together, and {layout} has one: leave it out")
    if layout.dp_shard % layout.ep:
        fits = ", ".join(str(n) for n in range(1, layout.dp_shard + 1) if layout.dp_shard % n == 0)
        raise LayoutError(
            f"{given} lets each copy train by itself, and ep={layout.ep} cuts its experts over more ranks than the "
            f"dp_shard={layout.dp_shard} of a copy: ep can be {fits}"
        )
    if layout.ddp_hook != "none":
        raise LayoutError(
            f"{given} leaves DDP nothing to send between copies, which is what layout.ddp_hook={layout.ddp_hook} "
            "changes, and inside of a copy a hook is not made: leave one of them"
        )
    if config.guard.spike == "skip":
        raise LayoutError(
            f"{given} gives each copy a gradient norm of its own, and guard.spike=skip judges one a step: use "
            "guard.spike=log"
        )
    for key, steps, what in (
        ("train.steps", config.train.steps, "the run ends"),
        ("evaluate.every", config.evaluate.every, "a model is evaluated"),
    ):
        if steps and steps % every:
            near = " or ".join(str(n) for n in (steps // every * every, (steps // every + 1) * every) if n)
            raise LayoutError(f"{key}={steps}: {what} where the copies are one, every {every} steps: {near} fits")


def _check_hook(config: Config, layout: Layout) -> None:
    hook = f"layout.ddp_hook={layout.ddp_hook}"
    if layout.pp > 1 or layout.ep > 1:
        axis = "pp" if layout.pp > 1 else "ep"
        why = "gradients are averaged after the last stage's backward" if axis == "pp" else "experts' are averaged"
        raise LayoutError(f"{hook} changes what DDP sends, and with {axis}={getattr(layout, axis)} {why} without it")
    if not layout.replicated:
        raise LayoutError(
            f"{hook} changes what DDP sends, and {layout} has no DDP: leave it out, or use dp_replicate above 1 "
            "without dp_shard"
        )
    if layout.ddp_hook != "powersgd":
        return
    if layout.tp > 1:
        raise LayoutError(
            f"{hook} sends a low rank of whole matrices, and tp={layout.tp} cuts them: use layout.ddp_hook=bfloat16"
        )
    if config.train.precision == "float16":
        raise LayoutError(
            f"{hook} keeps what it has not sent for the next step, and train.precision=float16 scales each step "
            "otherwise: use bfloat16"
        )
