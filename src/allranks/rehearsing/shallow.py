"""A deep pipeline, rehearsed with as few micro-steps as show all that a rank does in one of many.

Under `1f1b` a rank makes as many forwards before its first backward as there are stages from its own on, and torch's
schedule wants a micro-step for each stage. Here it takes fewer, and makes at most `WAITING` forwards first: of those
the second one stands for all that are left out, and the last backward but one for theirs
(`micro_steps.FewMicroSteps.find_windows`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from allranks.layout import Layout
from allranks.parallel.stage_run import Payload
from allranks.parallel.stage_schedule import Scheduler
from allranks.parallel.stages import Stages
from allranks.rehearsing.ledger import Stretch
from allranks.rehearsing.shortening import NotShortened
from allranks.rehearsing.world import replaced

WAITING = 3
"""Forwards before the first backward: the first one, one that repeats, and the last one, whose message goes together
with the first one that comes back."""


@contextmanager
def shallow(traced: int) -> Iterator[None]:
    """Inside, `1f1b` takes `traced` micro-steps, whatever the number of stages."""
    with ExitStack() as stack:
        stack.enter_context(replaced(Layout, "fits_schedule", lambda layout, micro_steps: micro_steps >= traced))
        stack.enter_context(replaced(Scheduler, "_make", _made_shallow(Scheduler._make)))
        yield


def _made_shallow(make: Callable[..., Any]) -> Callable[..., Any]:
    def run(scheduler: Scheduler, number: int, signature: Any) -> Any:
        stages = scheduler._mesh.layout.num_stages
        made = make(scheduler, max(number, stages), signature)  # torch asks for one each, and then takes what it has
        schedule = made.schedule
        schedule._n_microbatches = number
        schedule._num_stages = min(stages, schedule._stage.stage_index + WAITING)
        return made

    return run


def run_empty(stages: Stages, number: int) -> None:
    """Have the schedule for `number` micro-steps of the kind that has passed run, without the model."""
    scheduler, last = stages.scheduler, stages.pipeline.last
    _, signature = next(iter(scheduler.transport.sent))
    sent = {stage: found for (stage, kind), found in scheduler.transport.sent.items() if kind == signature}

    def compute(_: int, stage: int, received: Payload) -> Payload:
        through = sum((one.sum() for one in received if one.requires_grad), torch.zeros(()))
        if stage == last:
            return (through,)
        made = ((one, one.empty("cpu")) for one in sent[stage + 1])
        return tuple((tensor + through).to(one.dtype) if one.requires_grad else tensor for one, tensor in made)

    if scheduler.fits([signature] * number):
        scheduler.run([signature] * number, compute, scheduled=True)


def check_shallow(stretches: Sequence[Stretch]) -> None:
    """NotShortened where stages meet within micro-steps.

    Whether they then wait for each other for ever depends on how many forwards each makes first.
    """
    within = (one for one in stretches if one.phase in ("forward", "backward"))
    if any(message.across for one in within for message in one.messages):
        raise NotShortened("stages of the pipeline meet in collectives within a micro-step")
