"""How far rounding moves one device: its run again with what changes nothing else.

Every parameter is moved by an ulp, and the samples of a batch come in another order. Where their order means something
(two views of an image beside each other, rows that are steps in time) the other order is another computation, and says
nothing of rounding: then they stay in the program's own. What order does is told from rounding by its size, beside that
of an ulp of the least precise type in which a step computes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import torch

from allranks.verifying.assembly import moved_by
from allranks.verifying.evidence import largest
from allranks.verifying.recording import Parts, RunRecord

NUM_VARIANTS: Final = 2
TIMES_ULP: Final = 10.0  # of what parameters are moved by, in their own order; the same ulp in another moves as much
LEAST_OF_ORDER: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Of the model's largest value: by less than that rounding in a type may move something."""
ORDERED: Final = (
    "the order of the samples in a batch means something: another one moves what is computed by more than rounding "
    "does; so what rounding does was seen in their own order alone"
)
NOISY: Final = (
    "the order of the samples in a batch means something, or noise of generators of the program's own goes by it: what "
    "is off by less than a tenth may not be found"
)


class Seen(NamedTuple):
    """What a step does.

    Attributes:
        lowest: the least precise type in which it computes.
        draws: whether it draws from generators of the program's own, for places in the batch.
    """

    lowest: torch.dtype
    draws: bool


class Varied(Protocol):
    """A run with every parameter moved by an ulp of `ulp` (None: of what is run, as it is) in a direction that `shake`
    gives; `shuffled`: with the samples of a batch in another order.
    """

    def __call__(self, shake: int, shuffled: bool, ulp: torch.dtype | None) -> RunRecord: ...


def variants_of(first: RunRecord, run: Varied, look: Callable[[], Seen]) -> tuple[list[RunRecord], tuple[str, ...]]:
    """(runs that show what rounding does, notes on the order of samples).

    Args:
        first: the run that nothing moves.
        look: what a step does; asked for where another order moves something by more than float64 rounds.
    """
    shuffled = _without_error(run(number, True, None) for number in range(1, NUM_VARIANTS + 1))
    if _first_moved(first, shuffled, LEAST_OF_ORDER[torch.float64]) is None:
        return shuffled, ()
    seen = look()
    step = _first_moved(first, shuffled, LEAST_OF_ORDER[seen.lowest])
    if step is None:
        return shuffled, ()
    plain = _without_error(run(number, False, seen.lowest) for number in range(1, NUM_VARIANTS + 1))
    by_ulp = max((_moved(first, one, step) for one in plain), default=float("inf"))
    if min(_moved(first, one, step) for one in shuffled) <= TIMES_ULP * by_ulp:
        return shuffled, ()
    return (shuffled, (NOISY,)) if seen.draws else (plain, (ORDERED,))


def _without_error(runs: Iterable[RunRecord]) -> list[RunRecord]:
    return [run for run in runs if not run.error]


def _first_moved(first: RunRecord, variants: Sequence[RunRecord], least: float) -> int | None:
    """The first step in which every variant has moved by more than `least`; None where there is none."""
    steps = range(min((len(run.steps) for run in (first, *variants)), default=0)) if variants else range(0)
    return next((step for step in steps if all(_moved(first, run, step) > least for run in variants)), None)


def _moved(first: RunRecord, variant: RunRecord, step: int) -> float:
    """How far a step's gradients, buffers or what is kept have moved, by the largest value of these in the model.

    What is zero but for rounding may turn around, and is small beside that.
    """
    return max(_part_moved(first, variant, step, what) for what in ("raw", "gradients", "buffers", "kept"))


def _part_moved(first: RunRecord, variant: RunRecord, step: int, what: str) -> float:
    expected: Parts = getattr(first.steps[step], what)
    moved: Parts = getattr(variant.steps[step], what)
    most = largest(expected)
    far = [moved_by(part.value, [moved[name].value]) for name, part in expected.items() if name in moved]
    return max(far, default=0.0) / most if most else 0.0
