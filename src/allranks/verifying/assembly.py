"""Parts of tensors against whole ones: where they lie, how far they are off, by which factor."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from allranks.parameter_map import Box
from allranks.verifying.recording import Part, Parts

RELATIVE = 1e-12
OF_LARGEST = 1e-14
TIMES_ROUNDING = 32.0  # how much further than what rounding was seen to do a right program may be off
MOST = 0.1  # of the largest value, and no further: a factor of 9/8, one rank of 9 counted as 8, is never rounding
SAME = 1e-6  # relative: as far apart may be a part's initial value and the place that it was cut from
AS_ZERO = 0.01  # of the largest of all tensors: less than that may be zero but for rounding


@final
@dataclass(frozen=True)
class Mismatch:
    """A tensor that is not what one device has.

    Attributes:
        name: logical.
        ranks: whose part is off.
        error: the largest difference, absolute; infinite where a part is missing or not finite.
        bound: what was allowed.
        size: the largest expected value.
        factors: rank -> found / expected, where one factor explains that rank's part; nan where none does.
        agree: whether ranks that hold the same part hold the same.
        missing: nobody has it.
        missing_part: nobody has some of it.
    """

    name: str
    ranks: tuple[int, ...]
    error: float
    bound: float
    size: float
    factors: Mapping[int, float]
    agree: bool
    missing: bool = False
    missing_part: bool = False

    @property
    def relative(self) -> float:
        """The error by the largest expected value."""
        return self.error / self.size if self.size else math.inf

    @property
    def factor(self) -> float:
        """The factor that every rank has; nan where there is none."""
        values = list(self.factors.values())
        same = bool(values) and all(abs(v - values[0]) <= 1e-5 * max(1.0, abs(v)) for v in values)
        return sum(values) / len(values) if same else math.nan


Places = Mapping[tuple[str, int], Box]
MOST_PLACES = 64  # of a part, that are looked at one by one


def locate(whole: torch.Tensor, part: Part) -> list[Box]:
    """Where a part may lie in the whole tensor: at its box, or wherever its values are; [] where that cannot be seen.

    Values that repeat, as the zeros that a bias begins with, are in several places; of many only those count to which
    a cut into equal or nearly equal parts leads.
    """
    if part.box is not None:
        return [part.box]
    shape, own = tuple(whole.shape), tuple(part.value.shape)
    if shape == own:
        return [Box.whole(shape)]
    if len(shape) != len(own):
        return []
    dims = [dim for dim in range(len(shape)) if shape[dim] != own[dim]]
    if len(dims) != 1 or own[dims[0]] > shape[dims[0]] or not own[dims[0]]:
        return []
    (dim,), value = dims, part.value.to(whole.dtype)
    # Where its first slice is, the others may follow.
    first = torch.isclose(whole, value.narrow(dim, 0, 1), rtol=SAME, atol=0.0).movedim(dim, 0)
    starts = first.reshape(shape[dim], -1).all(1)[: shape[dim] - own[dim] + 1].nonzero().flatten().tolist()
    if len(starts) > MOST_PLACES:
        starts = [start for start in starts if 0 in (start % own[dim], (shape[dim] - start) % own[dim])]
    return [
        Box((0,) * dim + (start,) + (0,) * (len(shape) - dim - 1), own)
        for start in starts
        if torch.allclose(whole.narrow(dim, start, own[dim]), value, rtol=SAME, atol=0.0)
    ]


def moved_by(expected: torch.Tensor, variants: Iterable[torch.Tensor | None]) -> float:
    """How far what changes nothing but rounding has moved a tensor."""
    moved = [float((v - expected).abs().max()) for v in variants if v is not None and v.numel()]
    return max((m for m in moved if math.isfinite(m)), default=0.0)


def allowance(moved: float, size: float, largest: float = 0.0) -> float:
    """How far off something may be because of rounding, at most a part of its size.

    What moves by more is either not rounding, and excuses nothing; or it is as good as zero: small beside the others,
    and turned around by rounding.

    Args:
        moved: by what changes nothing but rounding.
        size: its largest value.
        largest: that of all that it stands among.
    """
    times = TIMES_ROUNDING * moved
    as_zero = size <= min(times, AS_ZERO * largest)
    return times if as_zero else min(times, MOST * size)


def compare_parts(
    ranks: Sequence[Parts],
    expected: Parts,
    variants: Sequence[Parts],
    places: Places,
    *,
    floor: float = 0.0,
    counted: Mapping[str, torch.Tensor] | None = None,
    relative: float = RELATIVE,
    sizes: Mapping[str, float] | None = None,
    largest: float = 0.0,
) -> list[Mismatch]:
    """What is off, in the order of `expected`.

    Args:
        ranks: what each rank has.
        expected: what one device has, whole.
        variants: the same under another rounding.
        places: (name, rank) -> where it lies, of parts without a box.
        floor: the least bound.
        counted: name -> which elements are compared; all where it is not there.
        relative: of a tensor's largest value that is allowed.
        sizes: name -> what rounding may take a part of; a tensor's largest value where it is not there.
        largest: the largest of those, for `allowance`.
    """
    found = []
    for name, (_, whole) in expected.items():
        moved = moved_by(whole, (variant[name].value if name in variant else None for variant in variants))
        size = float(whole.abs().max()) if whole.numel() else 0.0
        bound = max(relative * size, floor, allowance(moved, (sizes or {}).get(name, size), largest))
        mismatch = _compare(name, whole, ranks, places, bound, size, (counted or {}).get(name))
        if mismatch is not None:
            found.append(mismatch)
    return found


def _compare(
    name: str,
    whole: torch.Tensor,
    ranks: Sequence[Parts],
    places: Places,
    bound: float,
    size: float,
    counted: torch.Tensor | None,
) -> Mismatch | None:
    covered, first = torch.zeros_like(whole, dtype=torch.bool), torch.zeros_like(whole)
    error, off, agree, factors = 0.0, list[int](), True, dict[int, float]()
    for rank, parts in enumerate(ranks):
        if name not in parts:
            continue
        part = parts[name]
        box = part.box or places.get((name, rank)) or Box.whole(tuple(whole.shape))
        place = box.place(tuple(whole.shape))
        value, want = part.value.to(whole.dtype), whole[place]
        if value.shape != want.shape:
            return Mismatch(name, (rank,), math.inf, bound, size, {}, agree)
        before = covered[place]
        if bool(before.any()):
            apart = (value - first[place])[before].abs()
            agree = agree and not bool((apart > 2 * bound).any()) and bool(torch.isfinite(apart).all())
        first[place], covered[place] = value, True
        difference = (value - want).abs()
        if counted is not None:
            difference = difference * counted[place]
        worst = float(difference.max()) if difference.numel() else 0.0
        worst = worst if math.isfinite(worst) else math.inf
        factors[rank] = fit(value, want, bound)
        if not worst <= bound:
            off.append(rank)
            error = max(error, worst)
    missing = not bool(covered.all()) and whole.numel() > 0
    if missing:
        some = bool(covered.any())
        error = math.inf if some else size
        return Mismatch(name, tuple(off), error, bound, size, factors, agree, missing=not some, missing_part=some)
    return Mismatch(name, tuple(off), error, bound, size, factors, agree) if off else None


def fit(value: torch.Tensor, want: torch.Tensor, bound: float) -> float:
    """The factor f with value = f * want, nan where there is none."""
    square = float((want.double() * want.double()).sum())
    if square == 0.0 or not bool(torch.isfinite(value).all()):
        return math.nan
    factor = float((value.double() * want.double()).sum()) / square
    rest = float((value.double() - factor * want.double()).abs().max())
    return factor if rest <= max(4 * bound * max(1.0, abs(factor)), 1e-9 * float(want.abs().max())) else math.nan


def put_together(name: str, whole: torch.Tensor, ranks: Sequence[Parts], places: Places) -> torch.Tensor | None:
    """A tensor from the parts of all ranks; None where some of it is nowhere."""
    covered, found = torch.zeros_like(whole, dtype=torch.bool), torch.zeros_like(whole)
    for rank, parts in enumerate(ranks):
        if name in parts:
            box = parts[name].box or places.get((name, rank)) or Box.whole(tuple(whole.shape))
            place = box.place(tuple(whole.shape))
            if found[place].shape != parts[name].value.shape:
                return None
            found[place], covered[place] = parts[name].value.to(whole.dtype), True
    return found if bool(covered.all()) else None


def copies_of(
    name: str, whole: torch.Tensor, ranks: Sequence[Parts], places: Places
) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(ranks, tensor) of each copy that they hold together of a tensor; [] where some of it is nowhere.

    There are as many as its part with the most holders has; one with fewer has its last holder in the others, too.
    """
    holders: dict[Box, list[int]] = {}
    for rank, parts in enumerate(ranks):
        if name in parts:
            box = parts[name].box or places.get((name, rank)) or Box.whole(tuple(whole.shape))
            holders.setdefault(box, []).append(rank)
    found = []
    for number in range(max(map(len, holders.values()), default=0)):
        chosen = {some[min(number, len(some) - 1)] for some in holders.values()}
        tensor = put_together(name, whole, [p if rank in chosen else {} for rank, p in enumerate(ranks)], places)
        if tensor is None:
            return []
        found.append((tuple(sorted(chosen)), tensor))
    return found
