"""Which faults a trial brings about: drawn by a seed from what an undisturbed run was seen to pass.

Two faults of a schedule are at least two steps apart, so that each is an incident of its own and a step is finished
between them; some are followed by another one while the run recovers from them. Pure functions.
"""

import difflib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final, get_args

from allranks.config_keys import did_you_mean
from allranks.errors import ConfigError
from allranks.fault_points import (
    DISK_ERRORS,
    DISK_POINTS,
    KINDS,
    ONLY_AFTER_FAULTS,
    POINTS,
    UNCONNECTED_POINTS,
    WORKER_POINTS,
    Fault,
    Kind,
)

ANY = "*"
RECOVERY = ("start", "resume")
"""Points that a run passes while it recovers: a fault there follows another one."""
RESTARTED: tuple[Kind, ...] = ("kill", "stop", "segfault", "disconnect")
"""What the supervisor starts workers again after; all else ends the run, or only a save."""
FOLLOWED = 6  # one fault in so many comes while the run recovers from another
STEPS_APART = 2

Passed = Mapping[int, Mapping[str, Mapping[int, int]]]
"""Rank -> point -> step -> how often."""


@final
@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A kind of fault at a point; `named`: it was asked for by name, so it has to be possible."""

    point: str
    kind: Kind
    named: bool = False


def parse_choices(text: str | None) -> tuple[Choice, ...]:
    """`POINT[:KIND],...`, a point or kind `*` for all that go together; None: a kill at every point.

    Raises:
        ConfigError: no such point or kind, with the nearest; or a disk's error where nothing is written.
    """
    found: list[Choice] = []
    for part in (text or ANY).split(","):
        point, _, kind = part.strip().partition(":")
        kind = kind or "kill"
        _check_word(point, POINTS, "point")
        _check_word(kind, KINDS, "kind")
        if kind in DISK_ERRORS and point != ANY and point not in DISK_POINTS:
            raise ConfigError(f"'{part}': nothing is written at {point}; {kind} goes with {', '.join(_disk_points())}")
        if point in WORKER_POINTS and kind not in ("kill", ANY):
            raise ConfigError(f"'{part}': a process that loads data can only be killed; give {point}, or another point")
        # What a process that loads data leaves in the temporary folder nobody removes: by name only.
        points = tuple(name for name in POINTS if name not in WORKER_POINTS) if point == ANY else (point,)
        kinds = get_args(Kind) if kind == ANY else (kind,)
        named = ANY not in (point, kind)
        if kind == "disconnect" and point in UNCONNECTED_POINTS:
            raise ConfigError(f"'{part}': at {point} a process has no connection yet; name another point")
        found += [Choice(p, k, named) for p in points for k in kinds if _goes_with(p, k)]
    return tuple(dict.fromkeys(found))


def draw(passed: Passed, choices: Sequence[Choice], kills: int, seed: int) -> list[Fault]:
    """A schedule of `kills` faults, every choice as often as any other as far as there is room.

    Raises:
        ConfigError: a point that was asked for never happens in this program, or there is no room for so many.
    """
    if len(passed) == 1:
        choices = [choice for choice in choices if choice.kind != "disconnect"]
    if not choices:
        raise ConfigError("one process has no connections that could be cut: give --nproc 2, or another kind of fault")
    generator = random.Random(seed)
    sites = {choice: _sites(passed, choice) for choice in choices if choice.point not in RECOVERY}
    _check_possible(passed, choices, sites)
    mains = [choice for choice, found in sites.items() if found]
    restarts = not mains or any(choice.kind in RESTARTED for choice in mains)
    following = [choice for choice in choices if choice.point in RECOVERY and restarts and _recovers(passed, choice)]
    share = FOLLOWED
    if not mains:  # what comes in a recovery needs something to recover from
        mains, share = [Choice("agreement", "kill")], 2
        sites = {choice: _sites(passed, choice) for choice in mains}
    chosen = _choose(mains, sites, kills - kills // share if following else kills, generator)
    followed = _choose_followed(chosen, passed, following, kills - len(chosen), generator)
    if len(chosen) + len(followed) < kills:
        most = len(chosen) + len(followed)
        raise ConfigError(
            f"{kills} faults do not fit into this run: each takes {STEPS_APART} of its {_num_steps(passed)} steps, and "
            f"those of checkpoints a checkpoint; give --kills {most}, more train.steps, or other --points"
        )
    return _number(chosen, followed)


def _goes_with(point: str, kind: Kind) -> bool:
    if point in WORKER_POINTS:
        return kind == "kill"
    if kind == "disconnect":
        return point not in UNCONNECTED_POINTS
    return kind not in DISK_ERRORS or point in DISK_POINTS


def _check_word(word: str, known: Sequence[str] | Mapping[str, str], noun: str) -> None:
    if word == ANY or word in known:
        return
    near = did_you_mean(difflib.get_close_matches(word, list(known), n=3, cutoff=0.4))
    raise ConfigError(f"no such {noun} '{word}'" + (near or f"; they are {', '.join(known)}"))


def _disk_points() -> list[str]:
    return [name for name in POINTS if name in DISK_POINTS]


def _sites(passed: Passed, choice: Choice) -> list[tuple[int, int, int]]:
    """(step, rank, visits) of every passing."""
    return sorted(
        (step, rank, visits) for rank, points in passed.items() for step, visits in points.get(choice.point, {}).items()
    )


def _recovers(passed: Passed, choice: Choice) -> bool:
    """Whether a recovery passes the point: nothing is read back where nothing was saved."""
    return choice.point == "start" or _first_saved(passed) is not None


def _first_saved(passed: Passed) -> int | None:
    saved = [step for points in passed.values() for step in points.get("checkpoint.renamed", {})]
    last = _num_steps(passed)
    return min((step for step in saved if step < last), default=None)


def _num_steps(passed: Passed) -> int:
    return max((step for points in passed.values() for steps in points.values() for step in steps), default=0)


def _check_possible(
    passed: Passed, choices: Sequence[Choice], sites: Mapping[Choice, Sequence[tuple[int, int, int]]]
) -> None:
    for choice in choices:
        possible = bool(sites[choice]) if choice in sites else _recovers(passed, choice)
        if choice.named and not possible:
            happen = {name for points in passed.values() for name in points} | ONLY_AFTER_FAULTS
            raise ConfigError(
                f"{choice.point} never happens in this program: it passes "
                f"{', '.join(name for name in POINTS if name in happen)}; give one of these as --points, or change "
                "the run (checkpoint.every, evaluate.every, data.workers)"
            )


def _choose(
    choices: Sequence[Choice],
    sites: Mapping[Choice, Sequence[tuple[int, int, int]]],
    number: int,
    generator: random.Random,
) -> list[Fault]:
    """Faults at steps of their own; the choices with the fewest steps take theirs first, an even share each.

    Where there are fewer faults than choices, the generator says which of these it is.
    """
    some = generator.sample(sorted(choices), min(number, len(choices)))
    order = sorted(some, key=lambda choice: (len({step for step, *_ in sites[choice]}), choice))
    taken: set[int] = set()
    chosen: list[Fault] = []
    exhausted: set[Choice] = set()
    while len(chosen) < number and len(exhausted) < len(order):
        share = max(1, (number - len(chosen)) // (len(order) - len(exhausted)))
        for choice in [choice for choice in order if choice not in exhausted]:
            free = [site for site in sites[choice] if not taken & _around(site[0])]
            generator.shuffle(free)
            for _ in range(min(share, number - len(chosen))):
                free = [site for site in free if not taken & _around(site[0])]
                if not free:
                    exhausted.add(choice)
                    break
                step, rank, visits = free.pop()
                taken.add(step)
                chosen.append(Fault(0, choice.point, rank, step, generator.randint(1, visits), choice.kind))
    return sorted(chosen, key=lambda fault: fault.step)


def _around(step: int) -> set[int]:
    return set(range(step - STEPS_APART + 1, step + STEPS_APART))


def _choose_followed(
    chosen: Sequence[Fault], passed: Passed, following: Sequence[Choice], number: int, generator: random.Random
) -> dict[int, Fault]:
    """Index of a chosen Fault -> the one in its recovery."""
    first_saved = _first_saved(passed)
    found: dict[int, Fault] = {}
    places = [index for index, fault in enumerate(chosen) if fault.kind in RESTARTED]
    generator.shuffle(places)
    for index in places[:number]:
        reads = first_saved is not None and chosen[index].step > first_saved
        fitting = [choice for choice in following if choice.point == "start" or reads]
        if fitting:
            choice = generator.choice(sorted(fitting))
            rank = generator.choice(sorted(passed))
            found[index] = Fault(0, choice.point, rank, chosen[index].step, 1, choice.kind, after=0)
    return found


def _number(chosen: Sequence[Fault], followed: Mapping[int, Fault]) -> list[Fault]:
    """In the order in which they happen."""
    faults: list[Fault] = []
    for index, fault in enumerate(chosen):
        faults.append(replace(fault, number=len(faults)))
        if index in followed:
            faults.append(replace(followed[index], number=len(faults), after=len(faults) - 1))
    return faults
