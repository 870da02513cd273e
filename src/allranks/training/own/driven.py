"""Forwards that a world makes itself: for `run`, and for an evaluation with `metrics`.

Under cp each process gets a part of every sequence, and under pp a stage of the model: neither is what a user's own
line `model(batch)` could mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from allranks.data.random_keys import generators_kept
from allranks.parallel.compiled import uncompiled
from allranks.parallel.spread import Spread
from allranks.parallel.tensor_uses import uses_of_parts
from allranks.stepping.flops import count_flops
from allranks.stepping.passes import Forward, buffers_kept
from allranks.stepping.position_check import check_positions
from allranks.stepping.sequence_loss import check_sequence_loss, check_sequence_metrics
from allranks.stepping.uncompared import UNCOMPARED, pass_uncompared
from allranks.stepping.whole_check import Asked, compare_whole
from allranks.training.own.first_calls import FirstCalls
from allranks.training.own.forward import Loss, OwnTask, check_loss, check_number, make_forward
from allranks.training.own.models import OwnModels, needs_run
from allranks.training.own.same_batch import share_batch
from allranks.training.own.starts import Start
from allranks.verdict import Decision

Metrics = Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]


@final
class Driven:
    """The forward of the model that is trained.

    Args:
        decide: told what is found out on the first batch.

    Attributes:
        calls: the first calls of models, where a loop makes them itself.
    """

    def __init__(self, models: OwnModels, decide: Callable[[Decision], None]) -> None:
        self._models = models
        self._decide = decide
        self._forward: Forward | None = None
        self._compared: set[object] = set()
        self.calls = FirstCalls(models, decide)

    def forward(self, batch: Any) -> Forward:
        """The forward for batches like this one; what there is to find out on the first one is; collective then.

        Raises:
            TaskError, LayoutError: there is no model, it takes nothing of the batch, or no sequence is found.
        """
        if self._forward is None:
            forward = make_forward(self._models.trained)
            spread = forward.spread
            if spread.context is not None:
                self._decide(spread.context.meet(batch, forward.inputs(batch), self._models.sequence_dims))
            if spread.stages is not None:
                _pass_once(forward, batch)
            self._forward = forward
        return self._forward

    def measure(self, metrics: Metrics, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """`metrics` of the output for a batch; {} where another rank has the output; collective.

        Raises:
            LayoutError: on every rank: sequences are cut, and one of them is no sum over positions.
        """
        with self._models.driving():
            forward = self.forward(batch)
            placed = forward.place(batch)
            output = forward(placed)
            code = _code_of(metrics)
            # A rank that has compared its own may have given another function than the one that has not.
            if forward.spread.context is not None and not _on_all(code in self._compared, forward.spread):
                self._compared.add(code)
                check_sequence_metrics(forward, output, batch, metrics)
        return metrics(output, placed) if forward.spread.mesh.has_output else {}

    def compare(self, batch: Any, loss: Loss) -> None:
        """Once, before the first update: does the cut model compute what the whole one does? Collective.

        Under pp and cp; where the model can be called, its first call is compared. Where sequences are cut, the loss of
        whole ones is compared with the sum over their parts first. Where the values are not those of the start any more
        (after a resume), no more is compared, and that is said.

        Raises:
            LayoutError: on every rank, naming what differs.
        """
        trained = self._models.trained
        start = self._models.starts.pop(trained, None) if needs_run(trained.mesh.layout) else None
        if start is not None:
            with uncompiled(), uses_of_parts(trained):
                self._compare(start, batch, loss)
            self._models.go_on()

    def _compare(self, start: Start, batch: Any, loss: Loss) -> None:
        spread = self._models.trained
        why_not = start.why_not(spread)
        if spread.context is not None:
            with self._models.driving():
                number = partial(_number, loss)
                self._decide(check_sequence_loss(self.forward(batch), batch, number, what="the first micro-batch"))
        if why_not:
            with self._models.driving():
                self.forward(batch)  # under pp it is followed for what another stage has and does not send
            self._decide(pass_uncompared(spread, why_not))
            self._check_positions(batch)
            return
        with self._models.driving(), generators_kept(spread.bare()):
            task = OwnTask(lambda output, own: check_loss("run", loss(output, own)), start.whole.module)
            forward = replace(self.forward(batch), task=task)
            shared = share_batch(batch, spread)
            flops = count_flops(forward, shared, 1)
            whole = compare_whole(forward, shared, 0, flops, Asked("the first micro-batch"))
        self._decide(whole)
        if whole.what == UNCOMPARED:
            self._check_positions(batch)

    def _check_positions(self, batch: Any) -> None:
        if self._models.trained.context is not None:
            with self._models.driving():
                self._decide(check_positions(self.forward(batch), batch, what="the first micro-batch"))


def _code_of(metrics: Metrics) -> object:
    """By what it is the same function, which a loop may make anew each time, and bind other arguments to."""
    function: Any = metrics
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _number(loss: Loss, output: Any, batch: Any) -> torch.Tensor:
    return check_number("run", loss(output, batch))


def _pass_once(forward: Forward, batch: Any) -> None:
    """A pipeline learns what passes between its stages from a forward with gradients; nothing of it stays."""
    spread = forward.spread
    with generators_kept(spread.bare()), buffers_kept(spread, unless=False), torch.enable_grad():
        forward.raw(forward.place(batch), spread.bare())
    spread.reshard()


def _on_all(flag: bool, spread: Spread) -> bool:
    told = torch.tensor(float(flag), device=spread.device)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())
