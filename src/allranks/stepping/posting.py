"""Which sentinels watch over a run: all that can find something in it, but for those that are muted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from allranks.config import Config, GuardConfig
from allranks.data.stream import DataStream
from allranks.parallel.spread import Spread
from allranks.stepping.feeding import Feeding
from allranks.stepping.linkage import Linkage
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.pace import STEPS, Rates, pace_of
from allranks.stepping.passes import Forward
from allranks.stepping.randomness import Randomness
from allranks.stepping.recomputing import Recomputing, make_recomputing
from allranks.stepping.replicas import Replicas
from allranks.stepping.scaler import Scaler
from allranks.stepping.schedule import Schedule
from allranks.stepping.sentinel import Rounds, RoundSentinel, StepSentinel, Watch
from allranks.stepping.shards import Shards
from allranks.stepping.world import Processes


@final
@dataclass(frozen=True)
class Posted:
    """The sentinels of a run.

    Attributes:
        watch: those that look at each step.
        rounds: when the ranks are compared.
        comparing: those that compare them.
        recomputing: the one that has gradients computed twice; None: nobody does.
    """

    watch: Watch = field(default_factory=Watch)
    rounds: Rounds = field(default_factory=lambda: Rounds(0))
    comparing: tuple[RoundSentinel, ...] = ()
    recomputing: Recomputing | None = None


def post_all(
    config: Config,
    processes: Processes,
    forward: Forward,
    optimizers: Optimizers,
    schedule: Schedule,
    stream: DataStream,
    beside: Sequence[Any],
    *,
    fixed: bool,
) -> Posted:
    """The sentinels of a training, the one that has gradients computed twice among them; collective.

    Args:
        beside: as of `post_sentinels`.
        fixed: whether it matters which samples share a forward.

    Raises:
        ConfigError: a sentinel that was asked for cannot look at this training.
    """
    posted = post_sentinels(config.guard, processes, forward.spread, optimizers, schedule, stream, beside)
    return replace(posted, recomputing=make_recomputing(config, forward, processes, fixed=fixed))


def post_sentinels(
    guard: GuardConfig,
    processes: Processes,
    spread: Spread,
    optimizers: Optimizers,
    schedule: Schedule | None,
    stream: DataStream,
    beside: Sequence[Any],
    *,
    linkage: Linkage | None = None,
) -> Posted:
    """The sentinels of a run whose parameters are in place.

    Args:
        schedule: of the learning rate; None where the loop is the user's, who moves it, and who makes the steps.
        beside: what else has tensors; None for what is not.
        linkage: made earlier, when optimizers and model were linked.
    """
    rounds = Rounds(guard.digest_every)
    others = [other for other in beside if other is not None]
    alone = processes.size == 1
    randomness = Randomness(processes.mesh, rounds.due)
    feeding = Feeding(processes.mesh, stream, rounds.due)
    steps: list[StepSentinel] = [randomness, feeding]
    if schedule is not None:
        steps.insert(0, Rates(optimizers, schedule))
    comparing: list[RoundSentinel] = [linkage or Linkage(spread, optimizers), feeding]
    if not alone:
        replicas = Replicas(spread, optimizers, others, processes.world_group)
        steps.append(replicas)
        comparing += [replicas, Shards(spread), randomness]
    scaler = next((other for other in others if isinstance(other, Scaler)), None)
    paced = not alone and schedule is not None and STEPS not in guard.muted
    pace = None if not paced else pace_of(optimizers, scaler, settings=spread.stages is None)
    return Posted(
        Watch([one for one in steps if one.name not in guard.muted], pace),
        rounds,
        tuple(one for one in comparing if one.name not in guard.muted),
    )
