"""A forward of a Task with its weights as FSDP gathers them: in 16 bits, where one process alone has float32.

Autocast leaves embeddings, sums and what it has no rule for in the type that they come in. So what goes from block to
block is float32 in the step of one process, and may be in 16 bits under FSDP: only such a forward tells.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from allranks.parallel.spread import Spread
from allranks.profiling.fitting import Seen
from allranks.profiling.recorder import Recorder
from allranks.profiling.structure import Structure
from allranks.stepping.passes import Forward
from allranks.stepping.profiled_step import Batch
from allranks.task import Task, has_step, resolve_inputs


def record_gathered(task: Task, spread: Spread, structure: Structure, batch: Batch, to: torch.dtype) -> Seen | None:
    """The forward of a batch with weights of the type `to`; None where nobody knows.

    That is a Task with its own step, which no pipeline takes, and a model that does not run so: FSDP's run would fail
    by it, which a dry run says, and other layouts do not gather.
    """
    if has_step(task):
        return None
    with _gathered(structure, to) as weights:
        recorder = Recorder(structure.modules, weights, structure.buffers)
        try:
            with recorder.recording() as recording:
                inputs = resolve_inputs(task, spread.modules[""], batch.value)
                forward = Forward(task, spread, inputs.call)
                forward(forward.place(batch.value))
        except Exception:
            return None
    return Seen(batch.num_samples, batch.num_targets, recording)


@contextmanager
def _gathered(structure: Structure, to: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
    """Meanwhile the modules hold copies of the type `to`, by the logical names of what they stand for."""
    copies = {id(tensor): _copy(tensor, to) for tensor in structure.parameters.values()}
    places = [
        (module, name, parameter)
        for _, module in structure.members()
        for name, parameter in module._parameters.items()
        if id(parameter) in copies
    ]
    try:
        for module, name, parameter in places:
            setattr(module, name, copies[id(parameter)])  # as FSDP does: some modules (nn.LSTM) keep lists of theirs
        yield {name: copies[id(tensor)] for name, tensor in structure.parameters.items()}
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


def _copy(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """FSDP leaves as they are numbers without dims, which it does not cut, and integers."""
    if not tensor.dim() or not tensor.is_floating_point():
        return tensor
    return nn.Parameter(tensor.detach().to(to), requires_grad=tensor.requires_grad)
