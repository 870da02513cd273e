"""What a search asks of a choice: all of it, or whether it fits."""

from operator import is_
from typing import Protocol, final

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Estimate, Span
from allranks.planning.estimate import estimate
from allranks.planning.room import Room, room_of


class Fit(Protocol):
    """Whether a choice fits, and how nearly: a Room, or an Estimate."""

    @property
    def fits(self) -> bool:
        """Whether device and host have room."""

    @property
    def peak_bytes(self) -> Span:
        """On the fullest rank."""

    @property
    def capacity_bytes(self) -> float:
        """What a device has."""


class Estimator(Protocol):
    """What a search asks of a choice: all of it, or at a third of the price whether it fits."""

    def estimate(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Estimate:
        """Bytes, seconds and traffic."""

    def fit(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Fit:
        """Bytes alone."""


@final
class Formulas:
    """The Estimator that asks nothing but the planner's own formulas; what fits is mostly estimated next."""

    def __init__(self) -> None:
        self._last: tuple[ModelProfile, Cluster, Choice, Room] | None = None

    def estimate(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Estimate:
        """Bytes, seconds and traffic."""
        known = None
        if self._last is not None and all(map(is_, self._last, (profile, cluster, choice))):
            known = self._last[3]
        return estimate(profile, cluster, choice, known)

    def fit(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Fit:
        """Bytes alone."""
        room = room_of(profile, cluster, choice)
        self._last = profile, cluster, choice, room
        return room
