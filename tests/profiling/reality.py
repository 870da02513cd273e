"""What a step really keeps and computes: a plain torch loop on real tensors, which knows nothing of the profiler."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from allranks.task import Task, has_step, resolve_inputs


@dataclass(frozen=True)
class Reality:
    """Of one step: bytes of the storages that autograd kept, the model's own apart; torch's count of operations."""

    saved_bytes: int
    forward_flops: float
    backward_flops: float


def look(task: Task, num_samples: int, precision: str) -> Reality:
    """Run one step of so many samples."""
    torch.manual_seed(0)
    built = task.model()
    modules = built if isinstance(built, dict) else {"": built}
    if precision == "float64":
        for module in modules.values():
            module.double()
    samples = [task.dataset("train")[index] for index in range(num_samples)]
    batch = task.collate(samples)
    if precision == "float64":
        batch = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)
    own = [t for module in modules.values() for t in (*module.parameters(), *module.buffers())]
    forward, backward = 0, 0
    with keeping(own) as kept:
        for loss, flops in losses(task, modules, batch, precision):
            forward += flops
            with FlopCounterMode(display=False) as counter:
                loss.backward()
            backward += counter.get_total_flops()
    return Reality(sum(storage.nbytes() for storage in kept.values()), float(forward), float(backward))


def losses(task: Task, modules: dict[str, nn.Module], batch: Any, precision: str) -> Iterator[tuple[torch.Tensor, int]]:
    """Every loss of the step, one after the other, and the operations of its forward."""
    lower = nullcontext() if precision in ("float32", "float64") else torch.autocast("cpu", torch.bfloat16)
    if not has_step(task):
        arguments = resolve_inputs(task, modules[""], batch).call(batch)
        with FlopCounterMode(display=False) as counter:
            with lower:
                output = modules[""](*arguments)
            loss = task.loss(output.float() if output.dtype is torch.bfloat16 else output, batch)
        yield loss, counter.get_total_flops()
        return
    turns = iter(task.step(modules, batch))
    while True:
        with FlopCounterMode(display=False) as counter, lower:
            found = next(turns, None)
        if found is None:
            return
        yield found[1], counter.get_total_flops()


@contextmanager
def keeping(own: list[torch.Tensor]) -> Iterator[dict[int, Any]]:
    """Every storage that autograd keeps meanwhile, by its address; held, so that no address comes twice."""
    apart = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
