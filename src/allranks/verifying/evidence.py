"""What judging has before it: one device, all ranks, where parts lie; and words for differences."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from allranks.parameter_map import Box
from allranks.verifying.assembly import OF_LARGEST, RELATIVE, Mismatch, Places, allowance, compare_parts, moved_by
from allranks.verifying.recording import OneDevice, Parts, RunRecord, StepRecord
from allranks.verifying.world_view import WorldView

ZERO_OF_TENSOR, ZERO_OF_MODEL = 1e-6, 1e-10
Shares = Sequence[Sequence[Mapping[str, torch.Tensor]]]


@final
@dataclass(frozen=True)
class Evidence:
    """One device and the ranks.

    Attributes:
        places: where parts lie that were cut by hand.
        relative: of a tensor's largest value that rounding may take: law 4's, or of a lower precision.
        before: one device's steps before the first that is judged, where that is not its first.
        own_types: whether both sides have chosen the types of their tensors themselves, so that these are compared.
        noise_matters: whether ranks that share samples compute something else where they draw other noise for them, and
            do not take it from one of them; computed when it is asked for, not of a Task, whose ranks allranks seeds.
        shares: step -> gradients of each rank's micro-batches alone; computed when it is asked for.
        in_own_precision: the ranks' runs in the precision that the program has itself, where that is another one, and
            it runs in it; computed when it is asked for.
    """

    one: OneDevice
    ranks: Sequence[RunRecord]
    world: WorldView
    places: Places = field(default_factory=dict)
    relative: float = RELATIVE
    before: Sequence[StepRecord] = ()
    own_types: bool = True
    noise_matters: Callable[[], bool] = lambda: False
    shares: Callable[[int], Shares] = lambda step: ()
    in_own_precision: Callable[[], Sequence[RunRecord]] = lambda: ()

    @property
    def num_steps(self) -> int:
        """Steps that all have made."""
        return min(len(run.steps) for run in (self.one.run, *self.ranks))

    def step(self, index: int) -> tuple[StepRecord, list[StepRecord]]:
        """(one device's, the ranks') step."""
        return self.one.run.steps[index], [run.steps[index] for run in self.ranks]

    def compare(self, index: int, what: str) -> list[Mismatch]:
        """What is off of the parts `what` (a name of StepRecord's) of a step."""
        one, ranks = self.step(index)
        variants = [getattr(run.steps[index], what) for run in self.one.variants if len(run.steps) > index]
        expected: Parts = getattr(one, what)
        floor, counted, sizes, most = 0.0, None, None, largest(expected)
        if what in ("raw", "gradients"):
            floor = OF_LARGEST * most * (self.relative / RELATIVE)
        elif what == "parameters":
            counted, sizes = self._significant(index), self._ways(index)
            most = max(sizes.values(), default=0.0)
        else:
            most = max(most, largest(one.parameters))
        return compare_parts(
            [getattr(step, what) for step in ranks],
            expected,
            variants,
            self.places,
            floor=floor,
            counted=counted,
            relative=self.relative,
            sizes=sizes,
            largest=most,
        )

    def axis_apart(self, index: int, what: str, mismatch: Mismatch, axis: str = "") -> str:
        """Of `axis`, or of all, those along which ranks that hold the same part of a tensor have other values of it."""
        _, ranks = self.step(index)
        held = {rank: parts[mismatch.name] for rank, parts in enumerate(getattr(step, what) for step in ranks)
                if mismatch.name in parts}  # fmt: skip

        def differ(one: int, other: int) -> bool:
            if one not in held or other not in held:
                return False
            (first, mine), (second, others) = held[one], held[other]
            first = first or self.places.get((mismatch.name, one))
            second = second or self.places.get((mismatch.name, other))
            if first != second or mine.shape != others.shape or not mine.numel():
                return False
            apart = float((mine - others).abs().max())
            return not apart <= 2 * mismatch.bound

        return self.world.apart(differ, axis) if axis else self.world.axis_where(differ)

    def _ways(self, index: int) -> dict[str, float]:
        """How far parameters have gone by the end of a step: an update that is twice as large is never rounding."""
        start = self.one.run.start.parameters
        now = self.one.run.steps[index].parameters
        return {name: moved_by(part.value, [now[name].value]) for name, part in start.items() if name in now}

    def _significant(self, index: int) -> dict[str, torch.Tensor]:
        """Which elements of parameters are compared: what divides noise by noise (Adam) is not, from then on."""
        if all(name == "SGD" for name in self.one.run.start.optimizers):
            return {}
        found: dict[str, torch.Tensor] = {}
        for place, step in enumerate([*self.before, *self.one.run.steps[: index + 1]], -len(self.before)):
            gradients = step.gradients or step.raw
            most = largest(gradients)
            for name, part in gradients.items():
                size = part.value.abs()
                own = float(size.max()) if size.numel() else 0.0
                # An element that rounding may turn around is as good as zero, however large rounding is here.
                least = max(ZERO_OF_TENSOR * own, ZERO_OF_MODEL * most, self._rounding(place, name, part.value, most))
                # A gradient of exactly 0 everywhere moves nothing, and what moves there has no excuse.
                counts = size > least if own else torch.ones_like(size) > 0
                found[name] = found.get(name, torch.tensor(True)) & (counts | self._zero(place, name, part.value))
        return found

    def _zero(self, index: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Where a gradient of a step is exactly 0 on one device, however it rounds, and on all ranks: that is no noise.

        Nowhere of a step before the first, in which the ranks are not known.
        """
        if index < 0 or any(len(run.steps) <= index for run in (*self.one.variants, *self.ranks)):
            return torch.zeros_like(gradient, dtype=torch.bool)
        zero = gradient == 0
        for run in self.one.variants:
            part = (run.steps[index].gradients or run.steps[index].raw).get(name)
            zero = zero & (part.value == 0) if part is not None else torch.zeros_like(zero)
        covered = torch.zeros_like(zero)
        for rank, run in enumerate(self.ranks):
            part = (run.steps[index].gradients or run.steps[index].raw).get(name)
            if part is None:
                continue
            box = part.box or self.places.get((name, rank)) or Box.whole(tuple(gradient.shape))
            place = box.place(tuple(gradient.shape))
            if zero[place].shape == part.value.shape:
                zero[place] &= part.value == 0
                covered[place] = True
        return zero & covered

    def _rounding(self, index: int, name: str, gradient: torch.Tensor, most: float) -> float:
        """How far off a gradient of a step may be by what rounding was seen to do; 0 of a step before the first."""
        records = [run.steps[index] for run in self.one.variants if 0 <= index < len(run.steps)]
        moved = [(record.gradients or record.raw).get(name) for record in records]
        size = float(gradient.abs().max()) if gradient.numel() else 0.0
        return allowance(moved_by(gradient, (part.value for part in moved if part is not None)), size, most)


def largest(parts: Parts) -> float:
    """The largest magnitude of all of them."""
    sizes = [float(part.value.abs().max()) for part in parts.values() if part.value.numel()]
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def describe(mismatch: Mismatch, what: str, world: WorldView, axis: str = "") -> str:
    """A difference in words: by how much, by which factor (over an axis), on which ranks."""
    if mismatch.missing:
        return f"{what} {mismatch.name} is on no rank; on one device its largest is {mismatch.size:.3g}"
    if mismatch.missing_part:
        return f"{what} {mismatch.name} is in part on no rank"
    factor = world.in_words(mismatch.factor, axis)
    times = f"; it is {factor} times what one device has" if factor != "" else ""
    where = "" if len(mismatch.ranks) == world.size else f" on rank {', '.join(map(str, mismatch.ranks))}"
    off = "is not finite" if math.isinf(mismatch.error) else f"is off by {mismatch.relative:.3g} of its largest value"
    allowed = f" (allowed are {mismatch.bound / mismatch.size:.2g})" if mismatch.size else ""
    return f"{what} {mismatch.name} {off}{where}{allowed}{times}"


def few(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
