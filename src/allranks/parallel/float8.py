"""`train.precision=float8`: linear layers that multiply in eight bits, through torchao (an extra).

Parameters stay float32, and all else runs as under bfloat16. Input, weight and the output's gradient are scaled tensor
by tensor, by the largest magnitude that this forward (or backward) finds, so that what a process computes depends on
the samples that it has: law 4's table of exceptions says how much.

Source: torchao.float8 (https://github.com/pytorch/ao/tree/main/torchao/float8); Micikevicius et al., "FP8 Formats for
Deep Learning" (arXiv 2209.05433).
"""

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from allranks.errors import ConfigError, TaskError
from allranks.layout_refusals import FLOAT8_EXTRA
from allranks.parallel.balance import find_routers
from allranks.parallel.blocks import find_blocks
from allranks.verdict import Decision

MULTIPLE = 16  # of which both widths of a layer have to be multiples, or the kernels do not take it
CAPABILITY = (8, 9)  # of the first GPUs that have them (Ada, Hopper)


def lower_linears(
    modules: Mapping[str, nn.Module], hints: Sequence[str], device: torch.device, decisions: list[Decision]
) -> dict[str, nn.Module]:
    """`modules` with their linear layers in float8: those inside of blocks, or all where nothing repeats.

    What stands outside of the blocks (embeddings, the head) and what routes tokens to experts stays as it is, and so
    does a layer of another class than `nn.Linear`, or with hooks. Names and parameters stay.

    Args:
        hints: `hints().blocks`.
        device: where they will run; on the CPU the products are emulated in float32.

    Raises:
        ConfigError: torchao is missing, or the GPU has no such kernels.
        TaskError: no layer fits.
    """
    torchao = _import_torchao()
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        own, least = (".".join(map(str, version)) for version in (found, CAPABILITY))
        raise ConfigError(
            f"train.precision=float8 needs a GPU of compute capability {least} (Ada, Hopper or newer), and this one "
            f"has {own}: take train.precision=bfloat16"
        )
    # A GPU's product wants 16 to divide the number of rows, too, which are positions times samples.
    config = torchao.Float8LinearConfig(emulate=emulates(device), pad_inner_dim=True)
    blocks, lowered, left = find_blocks(modules, hints), dict(modules), list[str]()
    number = 0
    for which, module in modules.items():
        routers = set(map(id, (part for router in find_routers(module) for part in router.modules())))
        linears = {name: part for name, part in module.named_modules() if _is_plain(part) and id(part) not in routers}
        candidates = {name: part for name, part in linears.items() if _is_inside(name, blocks[which])}
        fitting = {id(part) for part in candidates.values() if _fits(part)}
        left += [name for name, part in candidates.items() if not _fits(part)]
        number += len(fitting)
        lowered[which] = torchao.convert_to_float8_training(
            module, module_filter_fn=lambda part, _, fitting=fitting: id(part) in fitting, config=config
        )
    if not number:
        widths = "no nn.Linear" if not left else f"no nn.Linear whose widths {MULTIPLE} divides (first {left[0]!r})"
        raise TaskError(f"train.precision=float8 finds {widths} in the model's blocks: take train.precision=bfloat16")
    decisions.append(_describe(number, left, any(blocks.values()), device))
    return lowered


def emulates(device: torch.device) -> bool:
    """Whether products are made in float32, of numbers that were rounded to eight bits."""
    return device.type == "cpu"


def _import_torchao() -> Any:
    try:
        with _quiet("torchao", "torch.utils._pytree"):
            return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ConfigError(f"{FLOAT8_EXTRA} ({error})") from error


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Inside, these loggers have errors alone to say.

    torchao warns of each of its libraries that this machine cannot load. They hold kernels of other formats: products
    of float8 are torch's own.
    """
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _is_inside(name: str, blocks: Sequence[str]) -> bool:
    return not blocks or any(f"{name}.".startswith(f"{block}.") for block in blocks)


def _is_plain(part: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(part) is nn.Linear and "forward" not in vars(part) and not any(getattr(part, name) for name in hooks)


def _fits(part: nn.Module) -> bool:
    assert isinstance(part, nn.Linear)
    return part.in_features % MULTIPLE == 0 and part.out_features % MULTIPLE == 0


def _describe(number: int, left: Sequence[str], blocks: bool, device: torch.device) -> Decision:
    where = "inside of the model's blocks" if blocks else "of the model, in which nothing repeats"
    rest = f"; {len(left)} of widths that {MULTIPLE} does not divide stay in bfloat16: {left[0]}" if left else ""
    rest += " ..." if len(left) > 1 else ""
    emulated = ", emulated in float32 since the device is the CPU" if emulates(device) else ""
    what = f"{number} linear layers {where} multiply in float8{emulated}"
    return Decision(what, f"train.precision=float8, all else as under bfloat16{rest}")
