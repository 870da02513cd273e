"""The micro-batches of a step that wait for its last one: a pipeline takes them all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.parallel.stages import Stages
from allranks.stepping.passes import Forward, Scale
from allranks.stepping.scheduled import ScheduledPasses
from allranks.training.own.forward import Loss, check_can_wait, check_loss


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    micro_step: MicroStep
    loss: Loss
    value: torch.Tensor


@final
class Staged:
    """A step through the stages of a pipeline, micro-batch by micro-batch from the outside."""

    def __init__(self, forward: Forward) -> None:
        assert forward.spread.stages is not None
        self._spread = forward.spread
        self._stages: Stages = forward.spread.stages
        self._passes = ScheduledPasses(forward)
        self._waiting: list[_Waiting] = []

    def add(self, micro_step: MicroStep, batch: Any, loss: Loss) -> torch.Tensor:
        """Have `batch` wait; its loss, which is nan until the step's last one has come.

        Raises:
            TaskError: `loss` would read another batch by then.
        """
        check_can_wait(loss, batch, self._spread.mesh.layout)
        precision, device = self._spread.precision.parameters, self._spread.device
        value = torch.full((), torch.nan, dtype=precision, device=device)
        self._waiting.append(_Waiting(replace(micro_step, batch=batch), loss, value))
        return value

    def run(self, batch: StepBatch, scale: Scale) -> torch.Tensor:
        """Forward and backward of all that wait, whose losses then have their values; this rank's sum; collective.

        Args:
            scale: by what each loss is multiplied before its backward.
        """
        waiting, self._waiting = self._waiting, []
        losses = [partial(_told, one) for one in waiting]
        whole = replace(batch, micro_steps=tuple(one.micro_step for one in waiting))
        (sums,) = self._passes.run(whole, scale, losses)
        self._share([one.value for one in waiting])
        return sums.loss

    def forget(self) -> None:
        """Nothing waits any more."""
        self._waiting = []

    def _share(self, values: Sequence[torch.Tensor]) -> None:
        """Every stage's rank has the losses, which the last stage has computed."""
        layout = self._spread.mesh.layout
        together = torch.stack(list(values))
        dist.broadcast(together, group=self._stages.group, group_src=layout.stage_rank(layout.num_stages - 1))
        for value, told in zip(values, together, strict=True):
            value.copy_(told)


def _told(waiting: _Waiting, output: Any, batch: Any) -> torch.Tensor:
    found = check_loss("run", waiting.loss(output, batch))
    waiting.value.copy_(found.detach().reshape(()))
    return found
