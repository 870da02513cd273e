"""Which ranks see the same samples, and numbers in words: what judging knows of a world."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from allranks.verifying.recording import RunRecord


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

    def layer_twins(self, rank: int) -> list[int]:
        """Those of them that compute the same layers: of one stage, where a pipeline has several."""
        stages = self.axes.get("pp", 1)  # the outermost axis of a mesh
        return [other for other in self.twins(rank) if other * stages // self.size == rank * stages // self.size]

    def axis_of(self, ranks: Sequence[int]) -> str:
        """Over which axis some ranks differ from the others."""
        return self.model_axis if self.data_ranks == 1 else self.data_axis

    def in_words(self, factor: float) -> str | float:
        """A factor as a number of ranks or micro-batches where it is one, else as it is."""
        if math.isnan(factor):
            return ""
        data, model = self.data_ranks, self.model_ranks
        numbers = {"D": data, "T": model, "N": self.size, "M": self.micro_batches}
        said = {"D": "data ranks", "T": self.model_axis, "N": "world size", "M": "micro-batches"}
        for key, value in numbers.items():
            if value > 1:
                for shown, number in ((f"{said[key]} = {value}", value), (f"1/{said[key]} = 1/{value}", 1 / value)):
                    if abs(factor - number) <= 1e-6 * number:
                        return shown
        return round(factor, 9)

    def is_count(self, factor: float, count: int) -> bool:
        """Whether a factor is `count` or its inverse, or such a power."""
        return count > 1 and any(abs(factor - count**power) <= 1e-6 * count**power for power in (-2, -1, 1, 2))


def view_of(ranks: Sequence[RunRecord]) -> WorldView:
    """The world of an own loop, from what each rank was fed: whoever got the same in every step shares its samples."""
    fed = [tuple(tuple(sorted(step.rows)) for step in run.steps) for run in ranks]
    # Ranks that are fed the same and share no layer repeat each other.
    first: dict[object, int] = {}
    numbers = [first.setdefault(rows, len(first)) for rows in fed]
    if len(first) == 1 and len(ranks) > 1 and (_are_copies(ranks) or _given_alike(ranks)):
        numbers = list(range(len(ranks)))
    data = len(set(numbers))
    model = len(ranks) // max(1, data)
    axes = {"dp": data, "model": model}
    batches = max((step.num_batches for run in ranks for step in run.steps), default=1)
    return WorldView(tuple(numbers), {name: degree for name, degree in axes.items() if degree > 1}, batches)


def _are_copies(ranks: Sequence[RunRecord]) -> bool:
    """Whether all ranks hold whole tensors."""
    cut = any(part.box is not None for run in ranks for part in run.start.parameters.values())
    return not cut and not _differ_in_shape(ranks)


def _given_alike(ranks: Sequence[RunRecord]) -> bool:
    """Whether fully_shard alone has cut the model, over all ranks, and every module is given the same on each."""
    return bool(ranks[0].given) and all(run.given == ranks[0].given for run in ranks)


def _differ_in_shape(ranks: Sequence[RunRecord]) -> bool:
    """Whether ranks hold parameters that others do not, or others of them."""
    kinds = [{(n, tuple(part.value.shape)) for n, part in run.start.parameters.items()} for run in ranks]
    values = {n for run in ranks for n in run.start.parameters}
    apart = any(
        run.start.parameters[n].value.shape == ranks[0].start.parameters[n].value.shape
        and not bool((run.start.parameters[n].value == ranks[0].start.parameters[n].value).all())
        for run in ranks
        for n in values
        if n in run.start.parameters and n in ranks[0].start.parameters
    )
    return any(kind != kinds[0] for kind in kinds) or apart
