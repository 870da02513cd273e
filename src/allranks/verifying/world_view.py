"""Which ranks see the same samples, and numbers in words: what judging knows of a world."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import final

from allranks.verifying.assembly import Places
from allranks.verifying.given import do_alike
from allranks.verifying.recording import RunRecord

OUTERMOST_FIRST = ("pp", "dp_replicate", "dp_shard", "dp", "cp", "tp")
"""As ranks are counted (`parallel.mesh.MESH_AXES`; a test compares)."""

SHARED = (
    "{} were fed the same samples, and are taken for ranks that share layers or a sequence; data ranks have to be fed "
    "other ones"
)


@final
@dataclass(frozen=True)
class WorldView:
    """The ranks of a run.

    Attributes:
        data_rank: rank -> number of the samples that it sees; ranks with the same number see the same.
        axes: name -> degree, of a layout; of an own loop "dp", and "model" for ranks that see the same.
        micro_batches: the most of a step.
    """

    data_rank: tuple[int, ...]
    axes: Mapping[str, int] = field(default_factory=dict)
    micro_batches: int = 1

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.data_rank)

    @property
    def data_ranks(self) -> int:
        """Groups of ranks with different samples."""
        return len(set(self.data_rank))

    @property
    def model_ranks(self) -> int:
        """Ranks that share the same samples."""
        return self.size // max(1, self.data_ranks)

    @property
    def data_axis(self) -> str:
        """The name of the axes over which samples differ."""
        names = [name for name, degree in self.axes.items() if degree > 1 and name.startswith("dp")]
        return "*".join(names) or "dp"

    @property
    def model_axis(self) -> str:
        """The name of the axes over which samples are the same."""
        names = [name for name, degree in self.axes.items() if degree > 1 and not name.startswith(("dp", "ep"))]
        return "*".join(names) or "model"

    def twins(self, rank: int) -> list[int]:
        """The ranks that see the same samples as `rank`."""
        return [other for other, data in enumerate(self.data_rank) if data == self.data_rank[rank]]

    @property
    def firsts(self) -> list[int]:
        """Of the ranks that see the same samples one each."""
        return sorted({data: rank for rank, data in reversed([*enumerate(self.data_rank)])}.values())

    def layer_twins(self, rank: int) -> list[int]:
        """Those of them that compute the same layers: of one stage, where a pipeline has several."""
        stages = self.axes.get("pp", 1)  # the outermost axis of a mesh
        return [other for other in self.twins(rank) if other * stages // self.size == rank * stages // self.size]

    def axis_of(self, ranks: Collection[int]) -> str:
        """Over which axis some ranks differ from the others."""
        return self.axis_where(lambda one, other: (one in ranks) != (other in ranks))

    def axis_where(self, differ: Callable[[int, int], bool]) -> str:
        """Over which axis ranks differ; where they cannot tell, all over which samples differ, or the model."""
        names = [name for name in self.axes if name != "ep"]
        return "*".join(self._along(differ, names)) or (self.model_axis if self.data_ranks == 1 else self.data_axis)

    def apart(self, differ: Callable[[int, int], bool], axis: str) -> str:
        """Of an axis, or of several as "A*B", those along which ranks differ; `axis` where they cannot tell."""
        return "*".join(self._along(differ, axis.split("*"))) or axis

    def axis_of_values(self, values: Mapping[int, float], due: float, allowed: float) -> str:
        """Of the data axes those along which the values of ranks are apart, or whose ranks the common factor counts."""

        def differ(one: int, other: int) -> bool:
            return one in values and other in values and abs(values[one] - values[other]) > allowed

        told = "*".join(self._along(differ, self.data_axis.split("*")))
        factor = next(iter(values.values()), math.nan) / due if due else math.nan
        return told or self.by_factor(factor, self.data_axis)

    def axis_of_factor(self, factor: float) -> str:
        """The axis whose ranks a factor counts; several, as "A*B", where it may be either, or nobody knows."""
        every = [name for name in self.axes if name != "ep"]
        fit = {name for name in every if is_one_of(factor, self._degree([name]))}
        for axis, count in ((self.data_axis, self.data_ranks), (self.model_axis, self.model_ranks)):
            fit |= set(axis.split("*")) if is_one_of(factor, count) else set()
        if not fit and is_one_of(factor, self.size):
            fit = set(every)
        if fit:
            return "*".join(name for name in every if name in fit) or self.axis_of(())
        model = self.is_count(factor, self.model_ranks) or self.data_ranks == 1
        return self.model_axis if model else self.data_axis

    def _along(self, differ: Callable[[int, int], bool], names: Iterable[str]) -> list[str]:
        """The axes along which two ranks differ that stand in the same place of all others."""
        places = [self._place(rank) for rank in range(self.size)]
        return [
            name
            for name in names
            if any(
                {key for key in one if one[key] != other[key]} == {name} and differ(first, second)
                for (first, one), (second, other) in combinations(enumerate(places), 2)
            )
        ]

    def by_factor(self, factor: float, axis: str) -> str:
        """Of an axis, or of several as "A*B", the one whose ranks a factor counts; `axis` where it cannot tell."""
        names = axis.split("*")
        if is_one_of(factor, self._degree(names)):
            return axis
        return "*".join(name for name in names if is_one_of(factor, self._degree([name]))) or axis

    def _place(self, rank: int) -> dict[str, int]:
        """Where a rank stands along each axis; {} where nobody knows."""
        if set(self.axes) <= {"dp", "model"}:
            return {"dp": self.data_rank[rank], "model": self.twins(rank).index(rank)}
        axes = [name for name in OUTERMOST_FIRST if name in self.axes]
        if self._degree(axes) != self.size:
            return {}
        place, left = {}, rank
        for name in reversed(axes):
            left, place[name] = divmod(left, self.axes[name])
        return place

    def _degree(self, names: Iterable[str]) -> int:
        return math.prod(self.axes.get(name, 1) for name in names)

    def in_words(self, factor: float, axis: str = "") -> str | float:
        """A factor as a number of ranks or micro-batches where it is one, else as it is; "" where it is no number.

        Args:
            axis: over which something is off: its own number is the one that is meant, where several are equal.
        """
        if not math.isfinite(factor):
            return ""
        for said, value in self._numbers(axis):
            inverse = f"1/({said})" if " or " in said else f"1/{said}"
            for shown, number in ((f"{said} = {value}", value), (f"{inverse} = 1/{value}", 1 / value)):
                if value > 1 and abs(factor - number) <= 1e-6 * number:
                    return shown
        return round(factor, 9)

    def _numbers(self, axis: str) -> list[tuple[str, int]]:
        """What a factor may be, in words: first of the axis, then of all ranks of a kind, then of each other axis."""
        groups = {self.data_axis: ("data ranks", self.data_ranks), self.model_axis: (self.model_axis, self.model_ranks)}
        own = [groups[axis]] if axis in groups else []
        every = [*groups.values(), ("world size", self.size), ("micro-batches", self.micro_batches)]
        return [*own, *self._alike(axis.split("*")), *every, *self._alike(self.axes)]

    def _alike(self, names: Iterable[str]) -> list[tuple[str, int]]:
        """Axes by their degree."""
        by_degree: dict[int, list[str]] = {}
        for name in names:
            by_degree.setdefault(self.axes.get(name, 1), []).append(name)
        return [(" or ".join(some), degree) for degree, some in by_degree.items()]

    def counts_an_axis(self, factor: float) -> bool:
        """Whether a factor is the degree of one axis or its inverse."""
        return any(is_one_of(factor, degree) for degree in self.axes.values())

    def is_count(self, factor: float, count: int) -> bool:
        """Whether a factor is `count` or its inverse, or such a power."""
        return count > 1 and any(abs(factor - count**power) <= 1e-6 * count**power for power in (-2, -1, 1, 2))


def is_one_of(factor: float, count: int) -> bool:
    """Whether a factor is `count` or its inverse."""
    return count > 1 and any(abs(factor - number) <= 1e-6 * number for number in (count, 1 / count))


def view_of(ranks: Sequence[RunRecord], places: Places | None = None) -> WorldView:
    """The world of an own loop: ranks that were fed the same in every step share its samples, unless they repeat it.

    Args:
        places: where parts lie that were cut by hand, as far as that is known.
    """
    fed = [tuple(tuple(sorted(step.rows)) for step in run.steps) for run in ranks]
    repeats = _repeats_of(ranks, len(set(fed)) == 1, places or {})
    # Ranks that are fed the same and share no layer and no sequence repeat each other: the second is another data rank.
    first: dict[object, int] = {}
    numbers = []
    for rank, rows in enumerate(fed):
        repeated = sum(fed[other] == rows and repeats(rank, other) for other in range(rank))
        numbers.append(first.setdefault((rows, repeated), len(first)))
    data = len(first)
    model = len(ranks) // max(1, data)
    axes = {"dp": data, "model": model}
    batches = max((len(step.batch_sizes) for run in ranks for step in run.steps), default=1)
    return WorldView(tuple(numbers), {name: degree for name, degree in axes.items() if degree > 1}, batches)


def _repeats_of(ranks: Sequence[RunRecord], all_alike: bool, places: Places) -> Callable[[int, int], bool]:
    """Whether of two ranks that are fed the same one does nothing that the other does not: for pairs of ranks.

    Where there are parts of layers or other samples as well, the ranks are meant to be of several kinds, and what
    compiled code does with the samples may be one: that is judged only where all modules with parameters are seen.

    Args:
        all_alike: whether all are fed the same.
    """
    others = range(1, len(ranks))
    plain = all_alike and all(_hold_alike(ranks, 0, other, places) for other in others)

    def repeats(rank: int, other: int) -> bool:
        one, two = ranks[rank], ranks[other]
        if not plain and (one.given.unseen or two.given.unseen or not _hold_alike(ranks, rank, other, places)):
            return False
        if one.start.gathered and not (one.given.calls and two.given.calls):
            return False
        return do_alike(one.given, two.given)

    return repeats


def _hold_alike(ranks: Sequence[RunRecord], rank: int, other: int, places: Places) -> bool:
    """Whether two ranks compute with the same parameters, after fully_shard has gathered what it has cut."""
    one, two = ranks[rank].start, ranks[other].start

    def is_alike(name: str) -> bool:
        if name in one.gathered or name in two.gathered:
            return one.gathered.get(name) == two.gathered.get(name)
        (box, mine), (its_box, its) = one.parameters[name], two.parameters[name]
        if (box or places.get((name, rank))) != (its_box or places.get((name, other))) or mine.shape != its.shape:
            return False
        return bool((mine == its).all())

    return one.parameters.keys() == two.parameters.keys() and all(map(is_alike, one.parameters))


def say_shared(world: WorldView) -> tuple[str, ...]:
    """A note on ranks that are fed the same and do not repeat each other; none where every rank has its own samples."""
    shared = {tuple(some) for rank in range(world.size) if len(some := world.twins(rank)) > 1}
    told = "; ".join(f"ranks {', '.join(map(str, some))}" for some in sorted(shared))
    return (SHARED.format(told),) if shared else ()
