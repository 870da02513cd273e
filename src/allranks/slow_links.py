"""What makes the copies of a model send each other less, and with what it does not go."""

from allranks.config import Config
from allranks.errors import LayoutError
from allranks.layout import Layout


def check_slow_links(config: Config, layout: Layout) -> None:
    """Refuse a `layout.ddp_hook` that would have nothing to do, or would do something else. Raises LayoutError."""
    if layout.ddp_hook != "none":
        _check_hook(config, layout)


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
