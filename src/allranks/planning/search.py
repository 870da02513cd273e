"""The search: the fastest choice that fits, without estimating them all.

Of a group (same degrees, schedule, micro-batch) the plain member has the least time: the others add communication,
recomputation or transfers to the host. The one that shares and recomputes all has the least memory. A group whose plain
member is slower than the best so far, or whose smallest member does not fit, holds no better one. Of what does not fit
nobody asks how long it takes. A test compares with all choices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import final

from allranks.cluster import Cluster
from allranks.layout import Layout
from allranks.layout_refusals import SPLIT_BACKWARD
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Estimate, Refusal, StepTime
from allranks.planning.choices import RECOMPUTES, Group, Space, groups, kept_modes, members, of_layout, splits
from allranks.planning.corrections import least_factor
from allranks.planning.estimator import Estimator, Fit, Formulas
from allranks.planning.setting import setting_of
from allranks.planning.upkeep_cost import NO_UPKEEP, with_upkeep

SCHEDULES = ("1f1b", "interleaved", *SPLIT_BACKWARD)
"""gpipe has 1f1b's bubble and looped_bfs that of interleaved, and both keep more activations."""

NEAR = 1.2
"""Where what should need the least memory needs so many times what there is, no other one fits either."""


@final
@dataclass
class Found:
    """What a search has estimated, and who was refused.

    Attributes:
        fits: those that were asked for their bytes alone.
        best: the fastest that fits; None where none does.
        nearest: the one with the least memory; of what would fail by something else only where nothing else is left.
    """

    estimates: dict[Choice, Estimate] = field(default_factory=dict)
    fits: dict[Choice, Fit] = field(default_factory=dict)
    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    best: Estimate | None = None
    nearest: Estimate | None = None

    @property
    def num_choices(self) -> int:
        """Those of which anything was asked."""
        return len(self.estimates.keys() | self.fits.keys())

    @property
    def limit(self) -> "Pace":
        """What a better one has to be below."""
        return NEVER if self.best is None else pace_of(self.best)

    def add(self, found: Estimate) -> Estimate:
        """Note it, and whether it is the best so far."""
        self.estimates[found.choice] = found
        if found.fits and (self.best is None or rank(found) < rank(self.best)):
            self.best = found
        if self.nearest is None or _distance(found) < _distance(self.nearest):
            self.nearest = found
        return found


Pace = tuple[float, float]
"""Seconds of a step with its waits, and without them: a step that waits for samples hides more work or less of it."""
NEVER: Pace = (float("inf"), float("inf"))


def pace_of(found: Estimate) -> Pace:
    """Rounded, so that figures of one size added in another order are equal."""
    return _rounded(found.step_seconds.expected), _rounded(found.time.work)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9g}")


def rank(found: Estimate) -> tuple[float, float, float]:
    """What the best has least of: time, then of the equally fast ones work, then memory."""
    return *pace_of(found), found.peak_bytes.high


def _distance(fit: Fit) -> tuple[bool, float]:
    """What the nearest has least of."""
    return isinstance(fit, Estimate) and bool(fit.fault), fit.peak_bytes.high


@final
@dataclass
class Search:
    """One search over a Space; `estimator` is replaced in tests."""

    space: Space
    estimator: Estimator = field(default_factory=Formulas)
    found: Found = field(default_factory=Found)

    def run(self) -> Found:
        """Search all of the space; where its layout is fixed, weigh what is left."""
        if self.space.layout is not None:
            return self.weigh(of_layout(self.space, self.space.layout, self.found.refusals))
        for precision in self._fastest_first():
            waves: dict[int, list[Layout]] = {}
            for layout in self.space.layouts(self.space.profiles[precision]):
                waves.setdefault(layout.cp, []).append(layout)
            hopeless: set[tuple[int, int, int, str]] = set()
            for _, wave in sorted(waves.items()):
                self._search_wave(precision, wave, hopeless)
        if self.found.best is None:
            self._find_nearest()
        return self.found

    def weigh(self, choices: Iterable[Choice]) -> Found:
        """Estimate all of these, without pruning."""
        for choice in choices:
            self.estimate(choice)
        return self.found

    def estimate(self, choice: Choice) -> Estimate:
        """What a choice costs, kept for the next one who asks."""
        return self._estimate(self.space.profiles[choice.precision], choice)

    def _fastest_first(self) -> list[str]:
        """Precisions by the device's rate: what it is slow at is then seldom worth more than a look."""
        rates = self.space.cluster.device.peak_flops
        return sorted(self.space.profiles, key=lambda name: -rates.get(name, 0.0))

    def _search_wave(self, precision: str, wave: list[Layout], hopeless: set[tuple[int, int, int, str]]) -> None:
        """All layouts of one cp. More cp makes no step of these other degrees faster, so what lost stays lost."""
        bounds: list[tuple[Pace, int, Group]] = []
        for layout in wave:
            key = (layout.tp, layout.pp, layout.ep, layout.context)
            if layout.cp > 1 and key in hopeless:
                continue
            least = NEVER
            for group, bound in self._probe(precision, layout):
                least = min(least, bound)
                bounds.append((bound, len(bounds), group))
            if self.found.limit < least < NEVER:
                hopeless.add(key)
        for bound, _, group in sorted(bounds, key=lambda entry: entry[:2]):
            if bound >= self.found.limit:
                break
            self._expand(group)

    def _probe(self, precision: str, layout: Layout) -> Iterator[tuple[Group, Pace]]:
        """Groups that may hold a fit, each with a pace that none of its members is below."""
        too_large: dict[str, int] = {}
        for group in groups(self.space, precision, layout, SCHEDULES, self.found.refusals):
            choice = group.plain
            larger = too_large.get(choice.layout.schedule, choice.micro_batch + 1) <= choice.micro_batch
            if larger and choice.micro_steps > 1:
                continue  # it keeps more; a single one finds no gradients of others, and may keep less
            if not self._may_fit(group):
                too_large[choice.layout.schedule] = choice.micro_batch
                continue
            yield group, least_pace(self._weigh_plain(group), group.profile, self.space.cluster)

    def _weigh_plain(self, group: Group) -> Estimate:
        """The plain member, which counts as found where no fixed mode leaves it out."""
        modes, layout = self.space.modes, group.plain.layout
        shared = layout.dp > 1 and "sharding" in modes
        if shared or any(modes.get(mode, "none") != "none" for mode in ("recompute", "offload")):
            return self.estimator.estimate(group.profile, self.space.cluster, group.plain)
        return self._estimate(group.profile, group.plain)

    def _may_fit(self, group: Group) -> bool:
        """Whether the member with the least memory fits; where it nearly does, whether another one does.

        The one that does is estimated: it may be what somebody gives up time for.
        """
        for place, choice in enumerate(self._smallest(group)):
            fit = self._fit(group.profile, choice)
            if fit.fits:
                self._estimate(group.profile, choice)
                return True
            if place == 0 and fit.peak_bytes.high > NEAR * fit.capacity_bytes and not isinstance(fit, Estimate):
                return False  # as in _estimate_fitting, what was counted of one says nothing of others
        return False

    def _smallest(self, group: Group) -> Iterator[Choice]:
        """Members with little memory, that with the least first in most models."""
        shared = splits(self.space, group.plain.layout)
        most = shared[-1].dp_shard
        kept = sorted(
            kept_modes(self.space), key=lambda pair: -RECOMPUTES.index(pair[0]) if pair[0] in RECOMPUTES else 0
        )
        moved = [pair for pair in kept if pair[1] != "none"] or kept
        some = [layout for layout in shared if layout.dp_shard == most]
        return members(self.space, group, some, tuple(dict.fromkeys((*moved, *kept))))

    def _find_nearest(self) -> None:
        """Estimate the one with the least memory."""
        least = min(self.found.fits.items(), key=lambda item: _distance(item[1]), default=None)
        if least is not None:
            self.estimate(least[0])

    def _expand(self, group: Group) -> None:
        """Estimate the members of a group that may beat the best, the plainest modes first."""
        shared = splits(self.space, group.plain.layout)
        for pair in kept_modes(self.space):
            first = next(members(self.space, group, shared, (pair,)), None)
            if first is None:
                continue
            least = least_pace(self._estimate(group.profile, first), group.profile, self.space.cluster, kept=True)
            if least < self.found.limit:
                for alike in _most_shared_first(shared):
                    self._estimate_fitting(group.profile, members(self.space, group, alike, (pair,)))

    def _estimate_fitting(self, profile: ModelProfile, choices: Iterable[Choice]) -> None:
        """Of choices that need more and more memory, those that fit."""
        for choice in choices:
            fit = self._fit(profile, choice)
            if fit.fits:
                self._estimate(profile, choice)
            elif fit.peak_bytes.high > NEAR * fit.capacity_bytes and not isinstance(fit, Estimate):
                break  # an Estimate that does not fit may be what a dry run has counted: that says nothing of others

    def _fit(self, profile: ModelProfile, choice: Choice) -> Fit:
        known = self.found.estimates.get(choice) or self.found.fits.get(choice)
        if known is None:
            known = self.found.fits[choice] = self.estimator.fit(profile, self.space.cluster, choice)
        return known

    def _estimate(self, profile: ModelProfile, choice: Choice) -> Estimate:
        known = self.found.estimates.get(choice)
        return known or self.found.add(self.estimator.estimate(profile, self.space.cluster, choice))


def _most_shared_first(layouts: Iterable[Layout]) -> list[list[Layout]]:
    """The layouts of each sharding, those that share among the most ranks first."""
    alike: dict[str, list[Layout]] = {}
    for layout in layouts:
        alike.setdefault(layout.sharding, []).append(layout)
    return [sorted(some, key=lambda layout: -layout.dp_shard) for some in alike.values()]


def least_pace(plain: Estimate, profile: ModelProfile, cluster: Cluster, *, kept: bool = False) -> Pace:
    """What every member of a group takes at least: all of it but what sharding and, unless `kept`, recompute change.

    Members may be of other families than the plain one: they are corrected like the one that is corrected down the
    most. Samples and checkpoints are waited for by the least work, too.
    """
    time, choice = plain.time, plain.choice
    changed = replace(
        time,
        data=0.0,
        optimizer=0.0,
        recompute=time.recompute if kept else 0.0,
        # Who shares more moves less of his own.
        offload=0.0 if choice.layout.offload in ("parameters", "all") else time.offload,
    )
    work = changed.work * least_factor(cluster) / plain.correction
    if choice.upkeep == NO_UPKEEP:
        return _rounded(work), _rounded(work)
    return _rounded(with_upkeep(StepTime(compute=work), profile, cluster, setting_of(choice)).total), _rounded(work)


def front(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Those that no other one beats in both time and memory, the fastest first."""
    found: list[Estimate] = []
    for one in sorted(estimates, key=rank):
        if not found or one.peak_bytes.high < found[-1].peak_bytes.high:
            found.append(one)
    return found
