"""A Task's model as the profiler is told of it: built by the engine for one process, and taken apart as it would be."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from allranks.data.random_keys import seed_all
from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.losses import ChunkedHead
from allranks.parallel.batchnorm import uses_batch_statistics
from allranks.parallel.blocks import find_blocks
from allranks.parallel.expert import is_experts
from allranks.parallel.initial import Source
from allranks.parallel.mesh import build_mesh
from allranks.parallel.parallelize import parallelize
from allranks.parallel.precision import choose_precision
from allranks.parallel.spread import Spread
from allranks.parallel.tensor_plan import plan_tensor
from allranks.profiling.cache import plain_attributes
from allranks.profiling.structure import Structure
from allranks.task import Task
from allranks.users_code import users_code

SINGLE = Layout(kind="single")
SEED = 0


def spread_alone(task: Task, build: Callable[[], Any], precision: str, device: str) -> Spread:
    """The model as one process trains it."""
    with users_code(f"{type(task).__name__}.hints() raised"):
        hints = task.hints()
    return parallelize(
        build,
        build_mesh(SINGLE, device),
        choose_precision(precision, None, device),
        torch.device(device),
        source=Source(),
        seed=partial(seed_all, SEED),
        blocks=hints.blocks,
        tensor=hints.tensor,
        batchnorm=hints.batchnorm,
        optional=hints.optional,
        training=True,
    )


def describe(task: Task, spread: Spread) -> Structure:
    """What the engine knows of a Task's model: its blocks, its tensor parallel plan, who shares what with whom."""
    hints = task.hints()
    named = [(name, m) for which, module in spread.modules.items() for name, m in module.named_modules(prefix=which)]
    found = find_blocks(spread.modules, hints.blocks)
    blocks = tuple(f"{which}.{name}" if which else name for which, names in found.items() for name in names)
    try:
        styles: Mapping[str, Any] = plan_tensor(spread.modules, hints.tensor, 1).styles
    except LayoutError:
        styles = {}
    entries = [entry for _, entry in spread.map.items()]
    return Structure(
        name=type(task).__name__,
        modules=spread.modules,
        parameters={e.name: spread.tensors[e.name] for e in entries if e.kind == "parameter"},
        blocks=blocks,
        styles=styles,
        experts={name: int(m.num_experts) for name, m in named if is_experts(m)},
        stateful=tuple(name for name, m in named if uses_batch_statistics(m)),
        tied=tuple((e.name, e.alias_of) for e in entries if e.alias_of is not None and e.kind == "parameter"),
        coupled=task.coupled,
        buffers=tuple(spread.tensors[e.name] for e in entries if e.kind == "buffer"),
        # A head that takes its loss in parts gives no logits.
        loss_parallel=hints.loss_parallel or any(isinstance(m, ChunkedHead) for _, m in named),
    )


def identity(task: Task, structure: Structure, batches: Any) -> dict[str, Any]:
    """All that a profile depends on but the code: settings, hints, modules, tensors and the shapes of batches."""
    hints = task.hints()
    return {
        "torch": torch.__version__,
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "settings": task.settings,
        "attributes": plain_attributes(vars(task)),
        "hints": [list(hints.blocks), dict(hints.tensor), hints.batchnorm, list(hints.optional), hints.loss_parallel],
        "blocks": structure.blocks,
        "styles": dict(structure.styles),
        "modules": [(name, type(m).__qualname__, plain_attributes(vars(m))) for name, m in structure.members()],
        "parameters": {name: (*_shape(t), t.requires_grad) for name, t in structure.parameters.items()},
        "tied": structure.tied,
        "buffers": [_shape(t) for t in structure.buffers],
        "batches": pytree.tree_map_only(torch.Tensor, _shape, batches),
    }


def _shape(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype), list(tensor.shape)
