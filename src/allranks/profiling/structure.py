"""What the engine knows of a model, as the profiler is told it: names alone, and the tensors they stand for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from allranks.hints import TensorStyle


@final
@dataclass(frozen=True)
class Structure:
    """A model, and how the engine would take it apart.

    Attributes:
        name: of the Task or model.
        modules: the user's, by name ("" for a single one).
        parameters: logical name -> parameter; a tied one under each of its names.
        blocks: logical names of the repeated blocks, in order.
        styles: module -> how tensor parallelism would cut it; empty where it cannot.
        experts: names of modules of experts -> how many they are.
        stateful, tied, coupled: as in ModelProfile.
        buffers: what the modules hold besides parameters.
        loss_parallel: whether tensor parallelism leaves logits cut until the loss.
    """

    name: str
    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, torch.Tensor]
    blocks: tuple[str, ...] = ()
    styles: Mapping[str, TensorStyle] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    stateful: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    coupled: bool = False
    buffers: tuple[torch.Tensor, ...] = ()
    loss_parallel: bool = False

    def members(self) -> Iterable[tuple[str, nn.Module]]:
        """(logical name, module) of all modules, each once."""
        for which, module in self.modules.items():
            yield from module.named_modules(prefix=which)

    @property
    def sequence(self) -> bool:
        """Whether tensor parallelism cuts activations along the sequence between the cut layers."""
        return "sequence" in self.styles.values()


def is_inside(name: str, outer: str) -> bool:
    """Whether `name` is `outer` or lies in it; everything lies in ""."""
    return not outer or name == outer or name.startswith(f"{outer}.")
