"""A model that is too large to be verified here is made smaller in one of two ways, or not at all.

Its Task says how (`hints().small`), or blocks are left out that repeat others: neighbours in a list which are equal in
all that can be seen of them, of which the first stay. What remains is made of the same code, layer by layer. Anything
else would compute something that nobody trains, and is not done: then the answer is that it could not be verified.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from torch import nn

from allranks.layout import Layout
from allranks.parallel.equal_blocks import compared_tensors, kinds_of
from allranks.task import Task
from allranks.training.counted_parameters import LARGE, build_filled, build_unfilled, count_in, device_untouched
from allranks.units import format_bytes, format_count

BYTES: Final = 8  # of a number in float64
LIVE: Final = 4  # parameters, gradients and the two averages of Adam
RUNS_ALONE: Final = 4  # the run, the run with other random numbers, two with another rounding
TWICE: Final = 2  # a record, and its copy on the way to the process that judges
LONGEST_PERIOD: Final = 4
FEWEST: Final = 2


@final
@dataclass(frozen=True)
class Room:
    """What a model has to fit into.

    Attributes:
        available: bytes of memory that are free.
    """

    layout: Layout
    nproc: int
    num_steps: int
    available: int

    def needed(self, parameters: int) -> int:
        """Bytes that verify takes at its fullest, over all processes: one device's record, the ranks', their copies.

        A record holds whole copies of the parameters: one of the start, and of each step those of one device the
        gradients and the parameters, those of a rank Adam's state besides.
        """
        size = parameters * BYTES
        alone = RUNS_ALONE * (1 + 2 * self.num_steps) * size
        resumed = 1 + LIVE * (self.num_steps - max(1, self.num_steps // 2))
        rank = (1 + LIVE * self.num_steps + resumed) * size // self._sharers
        live = LIVE * size
        first = live + TWICE * alone + TWICE * alone
        return max(first, alone + self.nproc * (live // self._sharers + TWICE * rank + TWICE * rank))

    def fits(self, parameters: int, beside: int = 0) -> bool:
        """Whether so many parameters fit, and so many bytes beside."""
        return self.needed(parameters) + beside <= self.available

    def takes(self, parameters: int) -> str:
        """Parameters and bytes, in words."""
        return f"{format_count(parameters)} parameters take {format_bytes(self.needed(parameters))}"

    @property
    def _sharers(self) -> int:
        """Over how many ranks parameters are cut: for tp, which leaves some whole, as if it were all of them."""
        return self.layout.tp * self.layout.pp * (self.layout.dp_shard if self.layout.fully_sharded else 1)


@final
@dataclass(frozen=True)
class Size:
    """How much of a model is run.

    Attributes:
        settings: of the Task, as on the command line, that make it small.
        keep: repeats that are kept of each row of equal blocks; None: all.
        note: what was made smaller, and why; "" where nothing was.
        hindrance: why it cannot be run at any size; "" where it can.
    """

    settings: tuple[str, ...] = ()
    keep: int | None = None
    note: str = ""
    hindrance: str = ""


def choose_size(task: Task, room: Room, with_settings: Callable[[Sequence[str]], Task]) -> Size:
    """The full size where that fits, or where nobody can say how large it is.

    Args:
        with_settings: told settings (`task.NAME=VALUE`), makes the Task that has them.
    """
    whole = _parameters(task)
    if whole is None or room.fits(whole):
        return Size()
    free = format_bytes(room.available)
    because = f"the whole model's {room.takes(whole)} over all processes and their records, and {free} are free"
    small = tuple(f"task.{name}={json.dumps(value)}" for name, value in task.hints().small.items())
    if small:
        words = f"hints().small: {', '.join(small)}"
        left = _parameters(with_settings(small))
        if left is None or room.fits(left):
            return Size(small, note=f"shrunk by {words}; because {because}")
        return Size(hindrance=f"{because}; with {words} its {room.takes(left)} still")
    keep = max(FEWEST, room.layout.num_stages)
    modules = build_unfilled(task)
    valued = any(tensor.numel() >= LARGE for module in modules for tensor in compared_tensors(module))
    dropped = drop_repeats(modules, keep, LARGE - 1)
    left = count_in(modules)
    # Every process makes the whole model before it leaves blocks out.
    fits = room.fits(left, beside=room.nproc * whole * BYTES)
    if dropped and fits and valued:  # of a mask of that size only a model that is filled has the values
        modules = build_filled(task)
        dropped = drop_repeats(modules, keep)
        left = count_in(modules)
        fits = room.fits(left, beside=room.nproc * whole * BYTES)
    if dropped and fits:
        return Size(keep=keep, note=f"shrunk: {'; '.join(dropped)}; because {because}")
    tried = f"without repeated blocks its {room.takes(left)}, made from the whole" if dropped else "no blocks repeat"
    return Size(hindrance=f"{because}; {tried}")


def _parameters(task: Task) -> int | None:
    """How many parameters the Task's models have; None where they cannot be built without memory."""
    try:
        with device_untouched():
            return count_in(build_unfilled(task))
    except (Exception, SystemExit):  # the user's code may raise anything: at its full size it says so itself
        return None


def shrink(task: Task, keep: int | None) -> None:
    """Let `model()` of this very Task leave out blocks; None: leave it alone."""
    if keep is None:
        return
    whole = task.model

    def model() -> nn.Module | dict[str, nn.Module]:
        made = whole()
        drop_repeats(made.values() if isinstance(made, dict) else [made], keep)
        return made

    task.model = model  # type: ignore[method-assign]


def drop_repeats(modules: Iterable[nn.Module], keep: int, most: int | None = None) -> list[str]:
    """Leave the first `keep` repeats of each row of them, and what lies inside of these as it is; told in words.

    Args:
        most: see `kinds_of`.
    """
    told = []
    for module in modules:
        kept: list[str] = []
        for name, member in list(module.named_modules()):
            prefix = f"{name}." if name else ""
            if any(name.startswith(row) for row in kept) or not isinstance(member, nn.ModuleList | nn.Sequential):
                continue
            row = find_repeats(kinds_of([*member], most=most))
            first, end = (row.start + row.period * times for times in (keep, row.times))
            if first < end:
                kept.append(prefix)
                del member[first:end]
                told.append(f"{prefix}{first} to {prefix}{end - 1}, which repeat the blocks before them, are left out")
    return told


class Row(NamedTuple):
    """`times` repeats of `period` neighbours, from `start` on."""

    start: int
    period: int
    times: int


def find_repeats(looks: Sequence[object]) -> Row:
    """The row that repeats the most; of equal ones that of the shortest period. `times` is 1 where nothing does."""
    best = Row(0, 1, 1)
    for period in range(1, LONGEST_PERIOD + 1):
        for start in range(len(looks) - period):
            times = 1
            while looks[start : start + period] == looks[start + times * period : start + (times + 1) * period]:
                times += 1
            if (times - 1) * period > (best.times - 1) * best.period:
                best = Row(start, period, times)
    return best
