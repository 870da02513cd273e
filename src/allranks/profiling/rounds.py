"""Short pieces of work, timed by turns in all processes at once: a median each, and an end that all agree on."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

SAMPLE_SECONDS = 2e-3  # what a clock that is disturbed by microseconds measures well
CROWDED_SECONDS = 60e-3  # several turns of a process that shares its core: less would be timed between two turns
MOST_REPEATS = 20_000
MOST_FIRST = 4  # times what a call may take, for the first one: a library may start in it


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work.

    Attributes:
        key: what it is called in the result.
        call: does it once; the same number of collectives in every process.
        needed: measured however long it takes.
    """

    key: Hashable
    call: Callable[[], object]
    needed: bool = False


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """How the processes keep together.

    Attributes:
        barrier: waits for the other processes, before a clock starts.
        finish: waits for what the device has left undone, before a clock stops.
        agree: the largest of the numbers that the processes give; collective.
        budget_seconds: after which no further case and no further round begins.
        most_seconds: of one call; a case that takes longer is left out.
        sample_seconds: about how long one sample is.
        processor_time: count the seconds that this process computed, which no other program lengthens; not the clock's.
        figure: of the samples of all rounds.
    """

    barrier: Callable[[], None]
    finish: Callable[[], None]
    agree: Callable[[Sequence[float]], list[float]]
    budget_seconds: float
    most_seconds: float
    sample_seconds: float = SAMPLE_SECONDS
    processor_time: bool = False
    figure: Callable[[Sequence[float]], float] = statistics.median


def take_rounds(cases: Sequence[Case], rounds: int, pace: Pace) -> dict[Hashable, float]:
    """Key -> seconds of one call here, the pace's figure of all rounds; collective.

    A case that took too long, or came too late, is not in it.

    All cases are measured once in each round, so that what disturbs the machine for a while disturbs all of them.
    """
    began = time.perf_counter()
    kept = list(_choose(cases, began, pace))
    samples: dict[Hashable, list[float]] = {case.key: [] for case, _ in kept}
    for _ in range(rounds):
        for case, times in kept:
            samples[case.key].append(once(case, times, pace))
        if pace.agree([time.perf_counter() - began])[0] > pace.budget_seconds:
            break
    return {key: pace.figure(values) for key, values in samples.items()}


def _choose(cases: Sequence[Case], began: float, pace: Pace) -> Iterator[tuple[Case, int]]:
    """The cases that are quick enough, each with the number of its calls in one sample; alike in all processes."""
    for case in cases:
        (first,) = pace.agree([once(case, 1, pace)])  # what is made at the first call is nobody's time
        if first > MOST_FIRST * pace.most_seconds and not case.needed:
            continue
        seconds, spent = pace.agree([once(case, 1, pace), time.perf_counter() - began])
        if seconds < pace.most_seconds or case.needed:
            yield case, repeats(seconds, pace.sample_seconds)
        if spent > pace.budget_seconds:
            return


def repeats(seconds: float, sample_seconds: float) -> int:
    """Calls in one sample, where one takes `seconds`."""
    return max(1, min(MOST_REPEATS, round(sample_seconds / max(seconds, 1e-9))))


def once(case: Case, times: int, pace: Pace) -> float:
    """Seconds of one of `times` calls in a row."""
    clock = time.process_time if pace.processor_time else time.perf_counter
    pace.barrier()
    began = clock()
    for _ in range(times):
        case.call()
    pace.finish()
    return (clock() - began) / times
