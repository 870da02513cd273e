"""One optimizer step of an own loop, driven from outside: a micro-batch goes out, its loss comes back, the last steps.

The same parts as `stepping`: only who calls forward differs, and that the targets are counted in the step itself.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import seed_all
from allranks.errors import ConfigError, TaskError
from allranks.observing.counters import Stopwatch
from allranks.observing.recorder import Value
from allranks.parallel.spread import Spread
from allranks.stepping.agreement import Agreed, Agreement, Ballot, Pending
from allranks.stepping.ema import Ema
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.passes import Forward, ledger_of, micro_forward
from allranks.training.own.buckets import check_all_reached, must_settle, settle_buckets
from allranks.training.own.driven import Driven
from allranks.training.own.forward import Loss, Targets, check_loss, check_targets, count_targets
from allranks.training.own.models import OwnModels, needs_run
from allranks.training.own.staged import Staged


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished step, as rank 0 tells of it.

    Attributes:
        number: from 1.
        samples: consumed since the start of the run, this step's included; `size` of them in this step.
        lr: of the first group, as this step used it.
        seconds: from the request for its first batch to the update.
    """

    number: int
    samples: int
    size: int
    lr: float
    seconds: float
    pending: Pending
    grad_norm: torch.Tensor

    def values(self) -> dict[str, Value]:
        """Loss per target, gradient norm and ledger; tokens where a sample has more than one target."""
        agreed = self.pending.read()
        targets = float(agreed.next_targets)
        tokens: dict[str, Value] = {"tokens": targets} if targets > self.size else {}
        return tokens | {
            "loss": agreed.loss / max(1.0, targets),
            "grad_norm": float(self.grad_norm),
            "ledger": f"{agreed.ledger:016x}",
        }


@dataclass(slots=True)
class _Turn:
    """A micro-batch that is out, and how far the user's code has come with it."""

    micro_step: MicroStep
    last: bool
    state: Literal["given", "backward", "stepped"] = "given"
    forward: ExitStack = field(default_factory=ExitStack)


@final
class OwnStep:
    """The step of a world.

    Attributes:
        weight: 1, or 0 while the micro-batch that is out only fills this rank's place.
        stop_requested: (Ctrl-C, terminate) as this rank has seen them so far.
        averages: what follows the parameters; at most one.
    """

    def __init__(
        self,
        models: OwnModels,
        driven: Driven,
        agreement: Agreement,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        self.weight = 1
        self.stop_requested: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        self.averages: list[Ema] = []
        self._models = models
        self._driven = driven
        self._staged: Staged | None = None
        self._agreement = agreement
        self._device = device
        self._stopwatch = stopwatch
        self._batch: StepBatch | None = None
        self._turn: _Turn | None = None
        self._more = 1
        self._started = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._targets = 0
        self._accumulated: torch.Tensor | None = None  # one parameter that got a gradient in this step
        self._reduced_once = False
        self._pendings: deque[Pending] = deque(maxlen=2)

    @property
    def between_steps(self) -> bool:
        """Whether parameters, buffers and position stand at the end of a step."""
        return self._turn is None or self._turn.state == "stepped"

    def follow(self, spread: Spread, decay: float) -> Ema:
        """Average the parameters from here on. Raises TaskError, ConfigError: see `World.ema`."""
        if self.averages:
            raise TaskError("world.ema() was called already: a world has one average of its model")
        if not 0 < decay < 1:
            raise ConfigError(f"world.ema(decay={decay}): expected a number between 0 and 1, such as 0.999")
        self.averages.append(Ema(spread, decay))
        return self.averages[0]

    def begin(self, batch: StepBatch, more: int, started: float) -> None:
        """The step of `batch` begins, requested at `started`; `more`: this rank's samples after it, 0 at its end."""
        self.abandon()
        self._batch, self._more, self._started = batch, more, started

    def give(self, index: int) -> MicroStep:
        """The micro-step that goes out next, with everything set for its forward."""
        assert self._batch is not None
        micro_step = self._batch.micro_steps[index]
        last = index == len(self._batch.micro_steps) - 1
        turn = self._turn = _Turn(micro_step, last)
        self.weight = micro_step.weight
        self._models.trained.synchronise(last)
        self._models.forget_calls()
        for spread in self._models.all():
            if spread.stages is None:  # a pipeline enters it for each of its own forwards
                turn.forward.enter_context(micro_forward(spread, micro_step.weight))
        self._stopwatch.mark("input")
        seed_all(micro_step.random_key)
        return micro_step

    def take_back(self) -> None:
        """The user's code asks for more: has it done its part? Raises TaskError."""
        turn = self._turn
        if turn is not None and turn.state == "given":
            raise TaskError(f"the next batch was asked for, but {self._models.backward_call} of this one never came")
        if turn is not None and turn.last and turn.state != "stepped":
            raise TaskError("the next batch was asked for, but world.step(optimizer) of the last one never came")
        self._stopwatch.mark("other")

    def backward(self, loss: torch.Tensor, targets: int) -> None:
        """Accumulate the gradients of a sum over `targets` targets; the step's last one reduces them; collective."""
        turn = self._given("backward")
        self._models.check_whole_forward()
        self._accumulate(check_loss("backward", loss), check_targets("backward", targets), turn)

    def run(self, batch: Any, loss: Loss, targets: Targets) -> torch.Tensor:
        """Forward, loss and backward of the batch that is out, as `World.run` says; collective."""
        turn = self._given("run")
        if needs_run(self._models.trained.mesh.layout):
            self._driven.compare(batch, loss)
            self._models.trained.synchronise(turn.last)
        with self._models.driving():
            forward = self._driven.forward(batch)
            if forward.spread.stages is not None:
                return self._add_to_pipeline(forward, turn, batch, loss, count_targets(batch, targets))
            placed = forward.place(batch)
            found = check_loss("run", loss(forward(placed), placed))
            self._accumulate(found, count_targets(batch, targets), turn)
        return found.detach()

    def _add_to_pipeline(self, forward: Forward, turn: _Turn, batch: Any, loss: Loss, count: int) -> torch.Tensor:
        """Under a pipeline batches wait for the step's last one, and then pass together."""
        assert self._batch is not None
        self._staged = self._staged or Staged(forward)
        value = self._staged.add(turn.micro_step, batch, loss)
        self._count(None, count, turn)
        if turn.last:
            self._loss = self._staged.run(self._batch)
            self._stopwatch.mark("forward_backward")
        return value

    def _accumulate(self, loss: torch.Tensor, count: int, turn: _Turn) -> None:
        self._models.check_called()
        if self._accumulated is not None and self._accumulated.grad is None:
            raise TaskError(
                "the gradients of this step's earlier micro-batches are gone: leave out optimizer.zero_grad(), "
                "world.step does it when the step is over"
            )
        self._run_backward(loss, turn)
        self._count(loss, count, turn)

    def _count(self, loss: torch.Tensor | None, count: int, turn: _Turn) -> None:
        if turn.micro_step.weight:
            self._loss = self._loss if loss is None else self._loss + loss.detach().double()
            self._targets += count
        turn.forward.close()
        turn.state = "backward"
        self._stopwatch.mark("forward_backward")

    def step(self, optimizers: Optimizers, max_norm: float | None) -> FinishedStep | None:
        """After the step's last micro-batch: agree, divide once, clip, update (law 3); else None; collective."""
        turn = self._out("world.step()")
        if turn.state == "given":
            raise TaskError(f"world.step() came before {self._models.backward_call} of this batch")
        if turn.state == "stepped":
            raise TaskError(
                "world.step() was called twice in a step: a world has one optimizer; several need a Task with a `step`"
            )
        if not turn.last:
            return None
        self._models.trained.check_reduced()
        if self._staged is None:  # a pipeline has done so
            self._models.trained.reduce_scalars()
        assert self._batch is not None
        interrupt, terminate = self.stop_requested()
        ledger = ledger_of(self._batch)
        pending = self._agreement.start(Ballot(self._loss, self._targets, self._more, interrupt, terminate, ledger))
        scale = self._models.trained.divisor / pending.next_targets.clamp(min=1.0)
        self._stopwatch.mark("agreement")
        norm = self._models.trained.clip(optimizers.parameters(""), max_norm, scale)
        lr = self._update(optimizers)
        turn.state = "stepped"
        return self._finish(self._batch, pending, norm, lr)

    def agreed(self, lag: int) -> Agreed | None:
        """What the ranks agreed on `lag` steps before the last one; None where there was none."""
        return self._pendings[-1 - lag].read() if len(self._pendings) > lag else None

    def abandon(self) -> None:
        """Forget a step that was left unfinished, with its gradients."""
        if not self.between_steps:
            for parameter in self._models.trained.trainable().values():
                parameter.grad = None
        if self._staged is not None:
            self._staged.forget()
        self._turn, self._batch, self.weight = None, None, 1
        self._reset()

    def _given(self, call: str) -> _Turn:
        turn = self._out(f"world.{call}()")
        if turn.state != "given":
            raise TaskError(f"world.{call}() was called twice for one batch: add the losses, and call it once")
        return turn

    def _out(self, call: str) -> _Turn:
        if self._turn is None:
            raise TaskError(f"{call} outside of the loop: it belongs to a batch of `for batch in world.stream(...)`")
        return self._turn

    def _run_backward(self, loss: torch.Tensor, turn: _Turn) -> None:
        spread = self._models.trained
        first = turn.last and not self._reduced_once
        if first and must_settle(spread):
            settle_buckets(spread, loss)
        # A filler's loss counts nothing, but its backward runs: every rank takes part in every collective.
        (loss if turn.micro_step.weight else loss * 0.0).backward()
        if first:
            check_all_reached(spread)
            self._reduced_once = True
        if self._accumulated is None and not turn.last:
            self._accumulated = next((p for p in spread.trainable().values() if p.grad is not None), None)

    def _update(self, optimizers: Optimizers) -> float:
        optimizer = optimizers.by_name[""]
        lr = float(optimizer.param_groups[0]["lr"])
        optimizers.update("")
        for average in self.averages:
            average.update()
        self._models.trained.balances.finish_step()
        self._models.reshard()
        self._stopwatch.mark("optimizer")
        return lr

    def _finish(self, batch: StepBatch, pending: Pending, norm: torch.Tensor, lr: float) -> FinishedStep:
        self._pendings.append(pending)
        self._reset()
        return FinishedStep(
            number=batch.step + 1,
            samples=batch.position + batch.size,
            size=batch.size,
            lr=lr,
            seconds=time.perf_counter() - self._started,
            pending=pending,
            grad_norm=norm,
        )

    def _reset(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._targets = 0
        self._accumulated = None
