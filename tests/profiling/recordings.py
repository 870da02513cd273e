"""Recordings of small modules, on fake tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from allranks.profiling.fakes import fake_mode
from allranks.profiling.fitting import Seen
from allranks.profiling.recorder import Recorder
from allranks.profiling.structure import Structure

Loss = Callable[[torch.Tensor], torch.Tensor]


def structure_of(module: nn.Module, **known: Any) -> Structure:
    """The Structure of a module, with what else is known of it."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return Structure("Small", {"": module}, parameters, buffers=tuple(module.buffers()), **known)


def step(module: nn.Module, structure: Structure, shape: tuple[int, ...], loss: Loss = torch.sum) -> Seen:
    """A forward, the sum of its output (or another loss) and the backward, of an input of this shape."""
    recorder = Recorder(structure.modules, structure.parameters, structure.buffers)
    with recorder.recording() as recording:
        loss(module(torch.zeros(shape))).backward()
    for parameter in module.parameters():
        parameter.grad = None
    return Seen(shape[0], shape[0], recording)


def observe(make: Any, *shapes: tuple[int, ...], loss: Loss = torch.sum, **known: Any) -> tuple[Structure, list[Seen]]:
    """The Structure of what `make` builds, and a step of each shape."""
    with fake_mode():
        module = make()
        structure = structure_of(module, **known)
        return structure, [step(module, structure, shape, loss) for shape in shapes]


Styles = Mapping[str, Any]
