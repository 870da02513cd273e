"""One optimizer step, whoever asks for it: run, agree, clip, update."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from allranks import fault_points
from allranks.data.micro_step import StepBatch
from allranks.errors import TaskError
from allranks.observing.counters import Stopwatch
from allranks.parallel.spread import Spread
from allranks.stepping.agreement import NOTHING, Agreement, Ballot, Pending, Saving
from allranks.stepping.ema import Ema
from allranks.stepping.guards import StepGuard, all_of, any_of
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.origin import Origin, find_origin
from allranks.stepping.outer import OuterOptimizer
from allranks.stepping.passes import Passes, Scale
from allranks.stepping.scaler import Scaler, Scaling
from allranks.stepping.schedule import Schedule
from allranks.stepping.sentinel import Watch


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished step: what was agreed (perhaps still on its way), and what rank 0 tells about it.

    Attributes:
        pending: the agreement.
        grad_norm: before clipping, of the last optimizer that was due; on CUDA still 0-dim on the device.
        lr: of the last optimizer that was due.
        upcoming: the coming step's batch, None at the end.
        targets: the world's targets of the first loss, where they were counted in the step itself; else None.
        scaling: of the loss, under float16.
        skipped: 1.0 where an update was left out (on CUDA also 0.0 where none was), 0-dim; None: none was.
    """

    pending: Pending
    grad_norm: torch.Tensor | float
    lr: float
    upcoming: StepBatch | None
    targets: torch.Tensor | None = None
    scaling: Scaling | None = None
    skipped: torch.Tensor | None = None

    def values(self, before: Pending, samples: int) -> dict[str, float | str]:
        """Loss per target, gradient norm and ledger (16 hex digits) of this step; waits for its reduction.

        Where its `samples` samples have more than one target each, as text has, they are told as tokens.

        Args:
            before: the agreement of the step before, which carries this one's targets.
        """
        agreed = self.pending.read()
        targets = before.read().next_targets if self.targets is None else float(self.targets)
        tokens: dict[str, float | str] = {"tokens": targets} if targets > samples else {}
        scaling = {} if self.scaling is None else self.scaling.values()
        skipped = {"skipped": 1.0} if self.skipped is not None and float(self.skipped) else {}
        return tokens | {
            "loss": agreed.loss / max(1.0, targets),
            "grad_norm": float(self.grad_norm),
            "ledger": f"{agreed.ledger:016x}",
            **scaling,
            **skipped,
        }


class Step:
    """The step of a run, made once and called for every batch.

    Args:
        stop_requested: (Ctrl-C, terminate) as this rank has seen them so far.
        stopwatch: told what each part of the step was.
        ema: an average that follows the parameters; None for none.
        scaler: scales the loss, and says which steps are skipped; None for neither.
        guard: as the attribute.
        watch: looks at each step, and has the others hear of what it finds; None: nobody looks.

    Attributes:
        outer: puts copies together that are by themselves between its steps; None where there are none.
        guard: says which steps are skipped where nothing is scaled, and puts back what a skipped one has learnt; None:
            nothing is skipped.
        saving: where this rank stands with a checkpoint that is written beside the steps; asked at every agreement.
        expired: whether the run's time is over, by this rank's clock; asked likewise.
        due: whether a checkpoint is due, by this rank's clock; asked likewise.
    """

    def __init__(
        self,
        spread: Spread,
        passes: Passes,
        optimizers: Optimizers,
        schedule: Schedule,
        agreement: Agreement,
        *,
        max_norm: float | None,
        stop_requested: Callable[[], tuple[bool, bool]],
        stopwatch: Stopwatch,
        outer: OuterOptimizer | None = None,
        ema: Ema | None = None,
        scaler: Scaler | None = None,
        guard: StepGuard | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._spread = spread
        self._ranks = spread.mesh.layout.sample_ranks
        self.outer = outer
        self.saving: Callable[[], Saving] = lambda: NOTHING
        self.expired: Callable[[], bool] = lambda: False
        self.due: Callable[[], bool] = lambda: False
        self._passes = passes
        self._optimizers = optimizers
        self._schedule = schedule
        self._agreement = agreement
        self._max_norm = max_norm
        self._stop_requested = stop_requested
        self._stopwatch = stopwatch
        self._ema = ema
        self._scaler = scaler
        self.guard = guard
        self._watch = watch
        self._skipped: torch.Tensor | None = None  # whether the step before left out an update

    def agree_first(self, batch: StepBatch) -> Pending:
        """The agreement that goes before the first step: it carries that step's targets; collective."""
        return self._agree(torch.zeros((), dtype=torch.float64), 0, batch)

    def agree_last(self) -> Pending:
        """The one that comes after the last step: it carries whether that was skipped; collective."""
        return self._agree(torch.zeros((), dtype=torch.float64), 0, None)

    def run(self, batch: StepBatch, before: Pending, upcoming: Callable[[], StepBatch | None]) -> Outcome:
        """One step: run, agree, clip, update; collective.

        Args:
            batch: this rank's micro-steps.
            before: the agreement of the step before, which carries this one's targets.
            upcoming: loads the coming step's batch (None at the end), called once the backward is on its way.
        """
        mark = self._stopwatch.mark
        factor = self._schedule.factor(batch.seen, batch.size)
        pending: Pending | None = None
        scale, scaler, judged = self._scale(before), self._scaler, list[torch.Tensor | None]()
        if self.guard is not None:
            self.guard.begin()
        mark("agreement")
        for sums in self._passes.run(batch, scale):
            mark("forward_backward")
            if self._watch is not None:
                self._watch.look(sums.which, batch)
            if pending is None:
                coming = upcoming()
                mark("input")
                pending, targets = self._agree(sums.loss, sums.ledger, coming, batch), sums.targets
            divide = None if sums.targets is None else self._ranks / sums.targets.clamp(min=1.0)
            updated = self._optimizers.parameters(sums.which)
            if scaler is not None:
                divide = self._ranks / scaler.scale
                if sums.expected is not None and sums.targets is not None:
                    divide = divide * (sums.expected / sums.targets.clamp(min=1.0)).float()
            norm = self._spread.clip(updated, self._max_norm, divide)
            judged.append(self._judge(norm, batch.step + 1))
            lr = self._optimizers.step(sums.which, factor, judged[-1])
            mark("optimizer")
        if pending is None:
            raise TaskError("step() ended without yielding: yield (name, loss_sum, targets) at least once")
        skipped, self._skipped = all_of(judged), any_of(judged)
        if self._ema is not None and self.outer is None:
            self._ema.update(skipped)
        if self.guard is not None:
            self.guard.finish(skipped)
        # Each optimizer has been judged by itself; the scale, which they share, goes by all of them, once a step.
        scaling = None if scaler is None or self._skipped is None else scaler.update(self._skipped)
        self._spread.balances.finish_step()
        if self.outer is not None:
            taken = self.outer.finish_step(batch.step + 1, last=coming is None)
            if self._ema is not None and taken:
                self._ema.update(steps=taken)
            mark("optimizer")
        # Read here where it is at hand: the thread that writes would contend for the interpreter lock with the loop.
        told = norm.item() if norm.device.type == "cpu" else norm
        return Outcome(pending, told, lr, coming, targets, scaling, self._skipped)

    def find_origin(self, batch: StepBatch, before: Pending, group: dist.ProcessGroup | None) -> tuple[Origin, ...]:
        """As `origin.find_origin`, of a step that `run` has made of `batch` and `before`; collective."""
        return find_origin(self._passes, self._spread, batch, self._scale(before), group)

    def _judge(self, norm: torch.Tensor, step: int) -> torch.Tensor | None:
        if self._scaler is not None:
            return self._scaler.judge(norm)
        return None if self.guard is None else self.guard.judge(norm, step)

    def _scale(self, before: Pending) -> Scale:
        """What makes DDP's and FSDP2's mean over ranks the sum over targets, divided once by their number (law 3).

        The gradients of copies that are by themselves have these as their mean.
        """
        # What a gradient has to fit in float16 must not depend on the number of ranks: there they multiply afterwards.
        divisor = self._ranks if self._scaler is None else self._scaler.scale
        if self._spread.device.type == "cpu":
            return divisor / max(1, before.read().next_targets)
        return divisor / before.next_targets.clamp(min=1.0)

    def _agree(
        self, loss: torch.Tensor, ledger: int, upcoming: StepBatch | None, batch: StepBatch | None = None
    ) -> Pending:
        fault_points.reach("agreement")
        interrupt, terminate = self._stop_requested()
        targets = 0 if upcoming is None else upcoming.targets or 0
        samples = 0 if upcoming is None else sum(len(m.positions) for m in upcoming.micro_steps)
        path, wait = self._spread.path.take(), self._spread.path.wait
        pace, noticed = ("", False) if self._watch is None else self._watch.say(batch)
        told = (self._skipped, self.saving(), pace, noticed, self.expired(), self.due())
        ballot = Ballot(loss, targets, samples, interrupt, terminate, ledger, path, wait, *told)
        return self._agreement.start(ballot)
