"""Where an own loop stands: the micro-batch that is out, and what is told of a step that is over."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from allranks.data.micro_step import MicroStep
from allranks.errors import TaskError
from allranks.observing.recorder import Value
from allranks.stepping.agreement import Pending
from allranks.stepping.scaler import Scaling


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished step, as rank 0 tells of it.

    Attributes:
        number: from 1.
        samples: consumed since the start of the run, this step's included; `size` of them in this step.
        lr: of the first group, as this step used it.
        seconds: from the request for its first batch to the update.
        skipped: 1.0 where its gradients were not finite and it changed nothing; None or 0.0: it did.
        scaling: of the loss, under float16.
    """

    number: int
    samples: int
    size: int
    lr: float
    seconds: float
    pending: Pending
    grad_norm: torch.Tensor
    skipped: torch.Tensor | None = None
    scaling: Scaling | None = None

    def values(self) -> dict[str, Value]:
        """Loss per target, gradient norm and ledger; tokens where a sample has more than one target."""
        agreed = self.pending.read()
        targets = float(agreed.next_targets)
        tokens: dict[str, Value] = {"tokens": targets} if targets > self.size else {}
        skipped: dict[str, Value] = {"skipped": 1.0} if self.skipped is not None and float(self.skipped) else {}
        return tokens | {
            "loss": agreed.loss / max(1.0, targets),
            "grad_norm": float(self.grad_norm),
            "ledger": f"{agreed.ledger:016x}",
            **({} if self.scaling is None else self.scaling.values()),
            **skipped,
        }


@dataclass(slots=True)
class Turn:
    """A micro-batch that is out, and how far the user's code has come with it."""

    micro_step: MicroStep
    last: bool
    state: Literal["given", "backward", "stepped"] = "given"
    forward: ExitStack = field(default_factory=ExitStack)

    def check_done(self, backward_call: str) -> None:
        """The next batch is asked for: has the user's code done its part of this one? Raises TaskError."""
        if self.state == "given":
            raise TaskError(f"the next batch was asked for, but {backward_call} of this one never came")
        if self.last and self.state != "stepped":
            raise TaskError("the next batch was asked for, but world.step(optimizer) of the last one never came")

    def check_ready(self, backward_call: str) -> None:
        """`world.step` is called: is it its turn? Raises TaskError."""
        if self.state == "given":
            raise TaskError(f"world.step() came before {backward_call} of this batch")
        if self.state == "stepped":
            raise TaskError(
                "world.step() was called twice in a step: a world has one optimizer; several need a Task with a `step`"
            )

    def leave(self) -> None:
        """End its forward as an error does: what its end has the ranks exchange is not wanted; again: nothing."""
        with suppress(GeneratorExit), self.forward:
            raise GeneratorExit
