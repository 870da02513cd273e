"""Steps of many micro-steps in bounded time: a few are traced, and what repeats is repeated on paper.

Between its first and its last micro-steps a step does the same again and again. Without a pipeline that is one forward
and its backward. `1f1b` does so once as many micro-steps are under way as a rank ever has, of which there are no more
than stages; `interleaved` in rounds of one micro-step a rank, through each of a rank's stages. `gpipe` makes all
forwards before all backwards: there each repeats by itself, and what they keep adds up (`replay.Window`). So do those
of `1f1b` with which a deep pipeline fills, and the backwards with which it empties (`shallow.py`).

torch's stages receive each micro-step into memory of its own, which stays from step to step, as the batch does: what
rests grows with the number of micro-steps, too.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from allranks.config import Config
from allranks.data.cut import cut_step
from allranks.layout import Layout
from allranks.rehearsing.ledger import Ledger, Stored, Stretch
from allranks.rehearsing.rank_step import RankStep
from allranks.rehearsing.replay import Window
from allranks.rehearsing.shallow import WAITING
from allranks.rehearsing.shortening import NotShortened

MOST_MICRO_STEPS = 3
BEHIND_STAGES = 2
"""Of 1f1b, beyond those that fill the pipeline: one that repeats, and the last one."""
ROUNDS = 4
"""Of interleaved: to fill the pipeline, to have every gradient, to repeat, and to empty it."""


@final
@dataclass(frozen=True)
class FewMicroSteps:
    """A step of a few micro-steps that stands for one of many.

    Attributes:
        config: whose steps are cut into `traced` micro-steps; `number`: that the whole step has.
        period: forwards of a rank after which it does the same again; 0: each by itself, and so does each backward.
        filling: forwards that the first stage makes before its first backward, beyond those that are traced.
    """

    config: Config
    number: int = 1
    traced: int = 1
    period: int = 1
    filling: int = 0

    @property
    def shallow(self) -> bool:
        """Whether a schedule has to take fewer micro-steps than it wants (`shallow.shallow`)."""
        return self.filling > 0

    def find_windows(self, stretches: Sequence[Stretch], stage: int = 0) -> tuple[Window, ...]:
        """What is repeated of a step that was traced on a rank of `stage`.

        NotShortened where it was not what was expected.
        """
        if self.traced == self.number:
            return ()
        forwards = [place for place, one in enumerate(stretches) if one.phase == "forward" and not one.block]
        if len(forwards) % self.traced:
            raise NotShortened("a micro-step is not one forward")
        left_out = self.number - self.traced
        if not self.period:
            first, past = (_begin_of_backward(stretches, number) for number in (1, 2))
            return tuple(Window(*ends, 1 + left_out) for ends in ((forwards[1], forwards[2]), (first, past)))
        stages = len(forwards) // self.traced
        filling = max(0, self.filling - stage)
        times = 1 + (left_out - filling) * stages // self.period
        windows = (Window(forwards[-1 - self.period], forwards[-1], times),)
        if not filling:
            return windows
        first, past = (_begin_of_backward(stretches, self.traced - number) for number in (2, 1))
        return Window(forwards[1], forwards[2], 1 + filling), *windows, Window(first, past, 1 + filling)

    def grow(self, resting: Iterable[tuple[Stored, int]], each: Iterable[Stored]) -> list[tuple[Stored, int]]:
        """What rests beside the whole step, where there is some of `each` for every micro-step."""
        known = {id(stored) for stored in each}
        return [
            (stored, num_bytes * self.number // self.traced if id(stored) in known else num_bytes)
            for stored, num_bytes in resting
        ]


def _begin_of_backward(stretches: Sequence[Stretch], number: int) -> int:
    for place, one in enumerate(stretches):
        if one.phase == "backward" and one.micro_step == number:
            return place
    raise NotShortened(f"micro-step {number} has no backward")


def fewer_micro_steps(config: Config, layout: Layout) -> FewMicroSteps:
    """As few micro-steps as show all that a step does; all of them for schedules whose steady state nobody knows."""
    number = cut_step(config.train, layout).num_micro_steps()
    few, period, filling = _least(layout)
    if number <= few or number < few + filling or config.train.global_batch % number:
        return FewMicroSteps(config, number, number)
    changes: dict[str, Any] = {"global_batch": config.train.global_batch // number * few}
    if config.train.micro_batch is None:
        changes["micro_steps"] = few
    train = config.train.model_copy(update=changes)
    # Ranges that are left out begin where whole steps do; which samples a step has is nothing to a dry run.
    data = config.data.model_copy(update={"skip": ""})
    return FewMicroSteps(config.model_copy(update={"train": train, "data": data}), number, few, period, filling)


def _least(layout: Layout) -> tuple[int, int, int]:
    """(Micro-steps that have to be traced, period, what fills the pipeline beyond those)."""
    if layout.pp == 1:
        return MOST_MICRO_STEPS, 1, 0
    filled = min(layout.num_stages, WAITING)
    known = {
        # Of three stages on torch keeps what the last forward but one has sent until the pipeline empties: that has to
        # be before what repeats, or every period would keep one.
        "1f1b": (filled + BEHIND_STAGES + (filled == WAITING), 1, layout.num_stages - filled),
        "interleaved": (ROUNDS * layout.pp, layout.num_stages, 0),
        "gpipe": (max(layout.num_stages, MOST_MICRO_STEPS), 0, 0),
    }
    return known.get(layout.schedule, (sys.maxsize, 1, 0))


def list_each(told: RankStep, ledger: Ledger) -> list[Stored]:
    """What rests for each micro-step: its batch, and what stages receive into."""
    stages = told.spread.stages
    leaves: list[Any] = pytree.tree_leaves([one.batch for one in told.batch.micro_steps])
    leaves += [] if stages is None else stages.scheduler.received_into
    return [ledger.find(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
