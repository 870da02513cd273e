"""One optimizer step of an own loop, driven from outside: a micro-batch goes out, its loss comes back, the last steps.

The same parts as `stepping`: only who calls forward differs, and that the targets are counted in the step itself.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import torch

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import seed_all
from allranks.errors import TaskError
from allranks.stepping.agreement import Agreed, Agreement, Ballot, Pending
from allranks.stepping.alike import explain_divergence
from allranks.stepping.buffer_check import FollowingBuffers
from allranks.stepping.ema import Ema
from allranks.stepping.guards import StepGuard
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.passes import Forward, ledger_of, micro_forward, tell_nonfinite
from allranks.stepping.scaler import Scaler
from allranks.training.own.buckets import check_all_reached, must_settle, settle_buckets
from allranks.training.own.driven import Driven
from allranks.training.own.forward import Loss, Targets, check_callable, check_loss, check_targets, count_targets
from allranks.training.own.ground import Ground
from allranks.training.own.links import Links
from allranks.training.own.scaling import make_scaling
from allranks.training.own.staged import Staged
from allranks.training.own.turn import FinishedStep, Turn
from allranks.training.own.watch import OwnWatch


@final
class OwnStep:
    """The step of a world.

    Attributes:
        weight: 1, or 0 while the micro-batch that is out only fills this rank's place.
        stop_requested: (Ctrl-C, terminate) as this rank has seen them so far.
        beside: what else has tensors to keep: the scale of float16, and an average of the parameters.
        links: of replicas that send each other less than their gradients.
        watch: the sentinels, which look right after the last backward of a step.
        driven: makes forwards itself, and sees the first of those that the loop makes.
    """

    def __init__(self, ground: Ground, driven: Driven, agreement: Agreement, watch: OwnWatch) -> None:
        self.weight = 1
        self.stop_requested: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        self.links = Links(agreement)
        self.watch = watch
        self._models = ground.models
        self.driven = driven
        self._staged: Staged | None = None
        self._agreement = agreement
        self._device = ground.device
        self._stopwatch = ground.stopwatch
        self._batch: StepBatch | None = None
        self._turn: Turn | None = None
        self._more, self._done = 1, 0
        self._steps_total: int | None = None
        self._started = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=ground.device)
        self._targets = 0
        self._accumulated: torch.Tensor | None = None  # one parameter that got a gradient in this step
        self._reduced_once = False
        self._pendings: deque[Pending] = deque(maxlen=2)
        self._guard: StepGuard | None = None
        self._following = FollowingBuffers()
        self._scaling = make_scaling(ground, agreement)
        self.beside: list[Ema | Scaler] = [] if self._scaling is None else [self._scaling.scaler]

    @property
    def between_steps(self) -> bool:
        """Whether parameters, buffers and position stand at the end of a step."""
        return self._turn is None or self._turn.state == "stepped"

    def begin(self, batch: StepBatch, more: int, started: float, steps_total: int | None) -> None:
        """The step of `batch` begins, requested at `started`; `more`: this rank's samples after it, 0 at its end."""
        self.abandon()
        self.watch.check()
        self.links.begin()
        self._guard = self._guard or StepGuard(self._models.trained)
        self._guard.begin()
        self._models.begin_step(batch)
        self._batch, self._more, self._started, self._steps_total = batch, more, started, steps_total

    def give(self, index: int) -> MicroStep:
        """The micro-step that goes out next, with everything set for its forward."""
        assert self._batch is not None
        micro_step = self._batch.micro_steps[index]
        last = index == len(self._batch.micro_steps) - 1
        turn = self._turn = Turn(micro_step, last)
        self.weight = micro_step.weight
        self._models.begin_forward(last)
        turn.forward.enter_context(self._models.watching())
        self.driven.calls.watch()
        for spread in self._models.all():
            if spread.stages is None:  # a pipeline enters it for each of its own forwards
                turn.forward.enter_context(micro_forward(spread, micro_step.weight))
        self._stopwatch.mark("input")
        seed_all(micro_step.random_key)
        return micro_step

    def take_back(self) -> None:
        """The user's code asks for more: has it done its part? Raises TaskError."""
        if self._turn is not None:
            self._turn.check_done(self._models.backward_call)
        self._stopwatch.mark("other")

    def backward(self, loss: torch.Tensor, targets: int) -> None:
        """Accumulate the gradients of a sum over `targets` targets; the step's last one reduces them; collective."""
        turn = self._given("backward")
        self._models.check_whole_forward()
        self._accumulate(check_loss("backward", loss), check_targets("backward", targets), turn)

    def run(self, batch: Any, loss: Loss, targets: Targets) -> torch.Tensor:
        """Forward, loss and backward of the batch that is out, as `World.run` says; collective."""
        turn = self._given("run")
        check_callable(loss)
        self.driven.compare(batch, loss)
        with self._models.driving():
            forward = self.driven.forward(batch)
            if forward.spread.stages is not None:
                return self._add_to_pipeline(forward, turn, batch, loss, count_targets(batch, targets))
            placed = forward.place(batch)
            found = check_loss("run", loss(forward(placed), placed))
            self._accumulate(found, count_targets(batch, targets), turn)
        return found.detach()

    def _add_to_pipeline(self, forward: Forward, turn: Turn, batch: Any, loss: Loss, count: int) -> torch.Tensor:
        """Under a pipeline batches wait for the step's last one, and then pass together."""
        assert self._batch is not None
        self._staged = self._staged or Staged(forward)
        value = self._staged.add(turn.micro_step, batch, loss)
        self._count(None, count, turn)
        if turn.last:
            scale = 1.0 if self._scaling is None else self._scaling.multiplier(self._targets, 1)
            with self._models.watching():
                self._loss = self._staged.run(self._batch, scale)
            self._stopwatch.mark("forward_backward")
            self.watch.look(self._batch)
        return value

    def _accumulate(self, loss: torch.Tensor, count: int, turn: Turn) -> None:
        self._models.check_called()
        self.driven.calls.end()
        self._check_kept()
        self._following.compare(self._models.trained, fed=turn.micro_step.weight > 0)
        self._run_backward(loss, turn, count)
        if turn.last and self._batch is not None:
            self.watch.look(self._batch)
        self._count(loss, count, turn)

    def _check_kept(self) -> None:
        if self._accumulated is not None and self._accumulated.grad is None:
            raise TaskError(
                "the gradients of this step's micro-batches are gone: leave out optimizer.zero_grad(), "
                "world.step does it when the step is over"
            )

    def _count(self, loss: torch.Tensor | None, count: int, turn: Turn) -> None:
        if turn.micro_step.weight:
            self._loss = self._loss if loss is None else self._loss + loss.detach().double()
            self._targets += count
        turn.forward.close()
        turn.state = "backward"
        self._stopwatch.mark("forward_backward")

    def step(self, optimizers: Optimizers, max_norm: float | None) -> FinishedStep | None:
        """After the step's last micro-batch: agree, divide once, clip, update (law 3); else None; collective."""
        turn = self._out("world.step()")
        turn.check_ready(self._models.backward_call)
        if not turn.last:
            return None
        self._check_kept()
        self._models.check_backward()
        if self._staged is None:  # a pipeline has done so
            self._models.trained.reduce_scalars()
        assert self._batch is not None
        interrupt, terminate = self.stop_requested()
        ledger = ledger_of(self._batch)
        path = self._models.trained.path
        told = (self._more, interrupt, terminate, ledger, path.take(), path.wait)
        pending = self._agreement.start(Ballot(self._loss, self._targets, *told))
        divide = (self._scaling or self.links).divide(self._models.trained, pending.next_targets)
        self._stopwatch.mark("agreement")
        norm = self._models.trained.clip(optimizers.parameters(""), max_norm, divide)
        assert self._guard is not None
        skipped = self._guard.judge(norm) if self._scaling is None else self._scaling.scaler.judge(norm)
        lr = self._update(optimizers, skipped)
        self._guard.finish(skipped)
        self._models.put_back_learnt(skipped)
        self.links.finish_step(self._batch.step + 1, self._steps_total)
        turn.state = "stepped"
        return self._finish(self._batch, pending, norm, lr, skipped)

    def agreed(self, lag: int) -> Agreed | None:
        """What the ranks agreed on `lag` steps before the last one, in which they entered the same units; or None.

        Raises:
            TaskError: on every rank: they have not.
        """
        if len(self._pendings) <= lag:
            return None
        pending = self._pendings[-1 - lag]
        agreed = pending.read()
        if agreed.diverged:
            where = self._agreement.group, self._device, pending.stage
            raise explain_divergence(pending.path, self._done - lag, *where)
        return agreed

    def abandon(self) -> None:
        """Forget a step that was left unfinished, with its gradients and what its forwards have learnt."""
        turn = self._turn
        if turn is not None and not self.between_steps:
            spread = self._models.trained
            turn.leave()
            spread.forget_gradients(halfway=turn.last and turn.state == "given")
            assert self._guard is not None
            self._guard.abandon()
            self.links.abandon(spread)
            spread.balances.forget()  # the guard does not know the counts: they are at zero after every step
            self._guard = None  # the next one looks anew which buffers a step changes: this one has changed none
            self._models.abandon_learnt()
        if self._staged is not None:
            self._staged.forget()
        self._turn, self._batch, self.weight = None, None, 1
        self._reset()

    def leave(self) -> None:
        """The world is left: end what still surrounds a forward, before the next world begins; not collective."""
        if self._turn is not None:
            self._turn.leave()

    def _given(self, call: str) -> Turn:
        turn = self._out(f"world.{call}()")
        if turn.state != "given":
            raise TaskError(f"world.{call}() was called twice for one batch: add the losses, and call it once")
        return turn

    def _out(self, call: str) -> Turn:
        if self._turn is None:
            raise TaskError(f"{call} outside of the loop: it belongs to a batch of `for batch in world.stream(...)`")
        return self._turn

    def _run_backward(self, loss: torch.Tensor, turn: Turn, count: int) -> None:
        spread = self._models.trained
        first = turn.last and not self._reduced_once
        if first and must_settle(spread):
            settle_buckets(spread, loss)
        # A filler's loss counts nothing, but its backward runs: every rank takes part in every collective.
        loss, count = (loss, count) if turn.micro_step.weight else (loss * 0.0, 0)
        assert self._batch is not None
        scaled = loss if self._scaling is None else loss * self._scaling.multiplier(count, len(self._batch.micro_steps))
        with self.links.reducing(spread, self._batch.step, self._targets + count) if turn.last else nullcontext():
            scaled.backward(tell_nonfinite(loss) if turn.micro_step.weight else None)
        if first:
            check_all_reached(spread)
            self._reduced_once = True
        if self._accumulated is None:
            self._accumulated = next((p for p in spread.trainable().values() if p.grad is not None), None)

    def _update(self, optimizers: Optimizers, skipped: torch.Tensor | None) -> float:
        optimizer = optimizers.by_name[""]
        lr = float(optimizer.param_groups[0]["lr"])
        optimizers.update("", skipped)
        for average in (other for other in self.beside if isinstance(other, Ema)):
            average.update(skipped)
        self._models.trained.balances.finish_step()
        self._models.reshard()
        self._stopwatch.mark("optimizer")
        return lr

    def _finish(
        self, batch: StepBatch, pending: Pending, norm: torch.Tensor, lr: float, skipped: torch.Tensor | None
    ) -> FinishedStep:
        self._pendings.append(pending)
        self._done = batch.step + 1
        self._reset()
        return FinishedStep(
            number=batch.step + 1,
            samples=batch.position + batch.size,
            size=batch.size,
            lr=lr,
            seconds=time.perf_counter() - self._started,
            pending=pending,
            grad_norm=norm,
            skipped=skipped,
            scaling=None if self._scaling is None or skipped is None else self._scaling.scaler.update(skipped),
        )

    def _reset(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._targets = 0
        if self._scaling is not None:
            self._scaling.forget()
        self._accumulated = None
