"""Which of several candidates each row of a batch has chosen: recorded on one device, and chosen again elsewhere.

In a low precision two candidates may score alike but for rounding, and a token then goes to another expert than on one
device, which moves gradients by far more than rounding does. So what one device has chosen is kept, and a run that is
compared with it chooses the same wherever its own scores call that a tie. Nothing is known of how a run is spread: a
row is found again by its own values (what its module was given), whichever rank has it, in whichever micro-step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple, final

import torch

NUM_NUMBERS: Final = 32  # of a fingerprint: distances between rows stay what they are, to a quarter or so
TIE: Final = 4.0  # of the low precision's eps, of a row's largest score: what rounding may move a score by
MOST_APART: Final = 0.25  # of a fingerprint's length: a row further from all others is none of them
ROWS_AT_ONCE: Final = 1024


class Place(NamedTuple):
    """Where is chosen: the module's logical name, among how many candidates, and how many of them."""

    module: str
    num_candidates: int
    num_chosen: int


@final
@dataclass(frozen=True)
class Choices:
    """What was chosen at one place.

    Attributes:
        rows: [n, NUM_NUMBERS] float32, `fingerprints` of what the module was given.
        chosen: [n, num_chosen], candidates in the order in which they were chosen.
    """

    rows: torch.Tensor
    chosen: torch.Tensor


Recorded = Mapping[Place, Choices]


def fingerprints(rows: torch.Tensor) -> torch.Tensor:
    """[n, width] -> [n, NUM_NUMBERS] float32, the same for the same values: a projection onto random directions."""
    return rows.float() @ _directions(rows.shape[1])


@cache
def _directions(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, NUM_NUMBERS, generator=generator)


@final
@dataclass
class Recorder:
    """Keeps what is chosen."""

    _kept: dict[Place, list[Choices]] = field(default_factory=dict)

    def decide(self, place: Place, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        """Keep it. Shapes: rows [n, width], scores [n, candidates], chosen [n, number]."""
        self._kept.setdefault(place, []).append(Choices(fingerprints(rows), chosen.clone()))

    def recorded(self) -> Recorded:
        """All of it."""
        return {
            place: Choices(torch.cat([one.rows for one in some]), torch.cat([one.chosen for one in some]))
            for place, some in self._kept.items()
        }


@final
@dataclass
class Replayer:
    """Chooses what was recorded, where the scores at hand call it a tie with what they would choose themselves.

    Attributes:
        recorded: one device's choices.
        lowered: the low precision.
        recognised: rows that were found again.
        replayed: of these, those that chose otherwise than they would have.
    """

    recorded: Recorded
    lowered: torch.dtype
    recognised: int = 0
    replayed: int = 0

    def decide(
        self, place: Place, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor | None:
        """What to choose instead, [n, number]; None: nothing else. Shapes as `Recorder.decide` has them."""
        known = self.recorded.get(place)
        if known is None:
            return None
        there, near = _nearest(fingerprints(rows), known.rows)
        self.recognised += int(near.sum())
        other = known.chosen[there]
        tie = near & self._ties(scores, scores.gather(1, chosen), scores.gather(1, other))
        moved = tie & (other != chosen).any(1)
        if not bool(moved.any()):
            return None
        self.replayed += int(moved.sum())
        return torch.where(moved.unsqueeze(1), other, chosen)

    def _ties(self, scores: torch.Tensor, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """[n]: whether in turn each of `other` scores what each of `own` does, but for rounding."""
        largest = scores.abs().masked_fill(~scores.isfinite(), 0.0).amax(1, keepdim=True)
        apart = torch.where(own == other, 0.0, (own - other).abs())  # what is masked scores -inf on both sides
        return (apart <= TIE * torch.finfo(self.lowered).eps * largest).all(1)


def _nearest(rows: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([n] which of `known` is nearest to each row, [n] whether it is near enough to be the same)."""
    places, distances = [], []
    for some in rows.split(ROWS_AT_ONCE):
        # Not by a product of matrices, which loses what rows that are near to each other differ in.
        distance, place = torch.cdist(some, known, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        places.append(place)
        distances.append(distance)
    return torch.cat(places), torch.cat(distances) <= MOST_APART * rows.norm(dim=1)
