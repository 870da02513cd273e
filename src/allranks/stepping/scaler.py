"""The gradient scaler of float16: a factor on the loss that keeps gradients within float16, and steps that are skipped.

The loss is multiplied by a scale before its backward, and gradients are divided by it before they are clipped. Where
one of them is not finite, on whichever rank, the step is skipped on all ranks and the scale is halved; after 2000 good
steps in a row it is doubled. All of it is tensors on the device: the host waits for none. Two places tell otherwise,
and say so: on the CPU, where everything is at hand, and for optimizers whose kernels cannot skip by themselves (all but
torch's fused Adam and AdamW), the host reads whether to skip, as torch's own scaler does.

Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740); torch.amp.GradScaler, whose numbers these
are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch.optim import Adam, AdamW, Optimizer

from allranks.parameter_map import Box, Entry

INITIAL_SCALE = 2.0**16
GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a step tells of its scale: 0-dim tensors of its own, on the device.

    Attributes:
        scale: that the step used.
        skipped: whether the step was skipped (1.0 or 0.0).
        skipped_steps: skipped since the start of the run, this one included.
    """

    scale: torch.Tensor
    skipped: torch.Tensor
    skipped_steps: torch.Tensor

    def values(self) -> dict[str, float]:
        """The numbers of a step's line in the journal; waits for the device."""
        found = {"loss_scale": float(self.scale), "skipped_steps": float(self.skipped_steps)}
        return found | ({"skipped": 1.0} if float(self.skipped) else {})


@final
class Scaler:
    """The scale of a run, the same on every rank.

    Args:
        device: where gradients lie.
        group: all ranks; None for one.

    Attributes:
        prefix: how its names in a checkpoint begin.
        scale: float32, a power of two: dividing by it rounds nothing.
    """

    prefix = "scaler."

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._size = 1 if group is None else dist.get_world_size(group)
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped_steps = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, norm: torch.Tensor) -> torch.Tensor:
        """1.0 where the step is to be skipped, else 0.0: a float32 tensor on the device; collective.

        Args:
            norm: of all gradients, which is not finite where one of them is not.
        """
        found = (~norm.isfinite()).to(device=self.scale.device, dtype=torch.float32)
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return found

    def update(self, skipped: torch.Tensor) -> Scaling:
        """The scale of the next step; what is to be told of this one."""
        used = self.scale.clone()
        torch._amp_update_scale_(self.scale, self._good_steps, skipped, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL)
        self._skipped_steps += skipped.to(torch.int64)
        return Scaling(used, skipped, self._skipped_steps.clone())

    def parts(self) -> list[tuple[Entry, torch.Tensor]]:
        """Its tensors, by their names in the checkpoint; every rank holds them."""
        named = {"scale": self.scale, "good_steps": self._good_steps, "skipped_steps": self._skipped_steps}
        everyone = tuple(range(self._size))
        return [
            (Entry(f"{self.prefix}{name}", (), str(value.dtype).removeprefix("torch."), Box.whole(()), everyone), value)
            for name, value in named.items()
        ]

    def aliases(self) -> dict[str, str]:
        """None of them is tied."""
        return {}

    def begin(self) -> None:
        """Begin with the first scale, which it has."""


def skips_on_device(optimizers: Iterable[Optimizer], device: torch.device) -> bool:
    """Whether these optimizers leave everything as it is by themselves where their attribute `found_inf` is 1.

    On the CPU, and of parameters that wait in its memory, it is not asked of them: the value is at hand, or will be.
    torch's fused SGD would skip, too, but leaves its momentum undefined when its very first step is skipped.
    """
    return device.type != "cpu" and all(
        type(optimizer) in (Adam, AdamW)
        and all(
            group.get("fused") and all(part.device.type == device.type for part in group["params"])
            for group in optimizer.param_groups
        )
        for optimizer in optimizers
    )
