"""Which sentinels watch over a run: all that can find something in it, but for those that are muted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from allranks.config import GuardConfig
from allranks.parallel.spread import Spread
from allranks.stepping.linkage import Linkage
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.pace import STEPS, Rates, pace_of
from allranks.stepping.replicas import Replicas
from allranks.stepping.scaler import Scaler
from allranks.stepping.schedule import Schedule
from allranks.stepping.sentinel import RoundSentinel, StepSentinel, Watch
from allranks.stepping.world import Processes


@final
@dataclass(frozen=True)
class Posted:
    """The sentinels of a run.

    Attributes:
        watch: those that look at each step.
        rounds: those that compare the ranks.
    """

    watch: Watch = field(default_factory=Watch)
    rounds: tuple[RoundSentinel, ...] = ()


def post_sentinels(
    guard: GuardConfig,
    processes: Processes,
    spread: Spread,
    optimizers: Optimizers,
    schedule: Schedule,
    beside: Sequence[Any],
) -> Posted:
    """The sentinels of a run whose parameters are in place; `beside`: what else has tensors, None for what is not."""
    others = [other for other in beside if other is not None]
    steps: list[StepSentinel] = [Rates(optimizers, schedule)]
    rounds: list[RoundSentinel] = [Linkage(spread, optimizers)]
    alone = processes.size == 1
    if not alone:
        replicas = Replicas(spread, optimizers, others, processes.world_group)
        steps.append(replicas)
        rounds.append(replicas)
    scaler = next((other for other in others if isinstance(other, Scaler)), None)
    pace = None if alone or STEPS in guard.muted else pace_of(optimizers, scaler, settings=spread.stages is None)
    return Posted(
        Watch([one for one in steps if one.name not in guard.muted], pace),
        tuple(one for one in rounds if one.name not in guard.muted),
    )
