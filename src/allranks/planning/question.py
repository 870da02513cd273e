"""Question: what a plan is asked for, as one value; the Space that a search takes follows from it."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from allranks.cluster import Cluster
from allranks.config_sections import LayoutConfig
from allranks.errors import ConfigError
from allranks.layout import Layout
from allranks.model_profile import ModelProfile
from allranks.plan import Choice
from allranks.planning.choices import Space
from allranks.planning.dry_run import DryRun
from allranks.planning.rules import parts_of_sequence
from allranks.upkeep import Upkeep

MakeProfile = Callable[[int | None, str], ModelProfile]
"""(positions of a sample or None for the model's own, precision) -> what the model costs."""

Rehearse = Callable[["Question", Choice], DryRun | str | None]
"""What a dry run of a Choice counted; why none can be made of it; None where no more are to be made."""

TOKENS_PER_STEP = 2**22
"""Of a model by name, where nobody gives a batch: about what large language models are trained with (2005.14165, table
2.1: 3.2M; 2407.21783, section 3.4.1: 4M). It does not depend on the devices (law 1)."""

WORTH_LOWERING = 1.5
"""How much faster than float32 a device has to be in a lower precision for that to be taken where nobody gives one:
activations take half the memory besides, and GeForce cards are twice as fast at least."""


@final
@dataclass(frozen=True)
class Question:
    """What to plan.

    Attributes:
        make_profile: of the model.
        precisions: that may be taken, at least one.
        seq: positions of a sample; None: the model's own.
        follows_length: whether nobody gave a batch, and samples of another length take the usual one of these; where
            the layout is written, no less than it takes.
        micro_batch: fixed by the user, or None.
        micro_steps: of a Task whose statistics or loss depend on them, or None.
        layout: degrees and modes that the user wrote; None where every one is open.
        modes: of a layout, by the names of its config; what is fixed where degrees are open.
        tokens: to train on; limits of time in seconds and of money in the cluster's currency.
        what_ifs: changes to look at, besides the usual ones: `KEY=VALUE`.
        notes: what was decided on the way here.
        upkeep: what the run does besides its steps.
        rehearse: makes dry runs of the best few, which correct the plan; None: nobody does.
    """

    make_profile: MakeProfile
    cluster: Cluster
    global_batch: int
    precisions: tuple[str, ...] = ("bfloat16",)
    seq: int | None = None
    micro_batch: int | None = None
    micro_steps: int | None = None
    layout: LayoutConfig | None = None
    modes: Mapping[str, object] = field(default_factory=dict)
    tokens: float | None = None
    limit_seconds: float | None = None
    limit_money: float | None = None
    what_ifs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rehearse: Rehearse | None = None
    upkeep: Upkeep = field(default_factory=Upkeep)
    follows_length: bool = False

    def space(self) -> Space:
        """What may be taken on the cluster.

        Raises:
            LayoutError: the written layout does not fit its devices.
            ConfigError: a micro-batch for a Task whose micro-steps are fixed, which training refuses, too.
        """
        cluster, layout = self.cluster, None
        if self.layout is not None:
            layout = Layout.resolve(self.layout, cluster.num_devices, cluster.nodes)
        profiles = {precision: self.make_profile(self.seq, precision) for precision in self.precisions}
        micro_steps = self.fixed_micro_steps(next(iter(profiles.values())))
        if micro_steps is not None and self.micro_batch is not None:
            why = "it has micro_steps" if self.micro_steps else "its result depends on which samples share a forward"
            raise ConfigError(
                f"micro_batch {self.micro_batch}: the forwards of this task's step are fixed at {micro_steps}, because"
                f" {why}: leave --micro-batch and train.micro_batch out, or give train.micro_steps another number"
            )
        return Space(
            profiles, cluster, self.global_batch, self.micro_batch, self.modes, micro_steps, layout, self.upkeep
        )

    def fixed_micro_steps(self, profile: ModelProfile) -> int | None:
        """Forwards of a step where they are fixed, for a model of that profile."""
        return self.micro_steps or fixed_micro_steps(profile)

    def on(self, cluster: Cluster) -> "Question":
        """The same on another cluster."""
        return replace(self, cluster=cluster)

    def of_length(self, seq: int) -> "Question":
        """The same of samples of `seq` positions; in the usual batch of these where nobody gave one.

        Raises LayoutError where the written layout does not fit the cluster.
        """
        found = replace(self, seq=seq, follows_length=False)
        return found.in_usual_batch(seq, self._least_batch()) if self.follows_length else found

    def in_usual_batch(self, seq: int, least: int = 1) -> "Question":
        """The same in the usual batch of samples of `seq` positions, but of no less than `least`, which it notes."""
        batch, note = usual_batch(seq)
        if batch < least:
            tokens = f"about {TOKENS_PER_STEP / 1e6:.1f}M tokens a step would be {batch} of {seq} each"
            batch, note = least, f"global batch {least}, because the layout takes no less; {tokens}"
        return replace(self, global_batch=batch, notes=(*self.notes, note))

    def parts_of_sequence(self) -> int:
        """Into how many equal parts the written layout cuts a sample; 1 where none is written.

        Raises LayoutError where it does not fit the cluster.
        """
        if self.layout is None:
            return 1
        return parts_of_sequence(Layout.resolve(self.layout, self.cluster.num_devices, self.cluster.nodes))

    def _least_batch(self) -> int:
        """Samples of a step with which the written layout leaves no rank idle and fills its pipeline; else 1."""
        if self.layout is None:
            return 1
        layout = Layout.resolve(self.layout, self.cluster.num_devices, self.cluster.nodes)
        if layout.pp == 1:
            return layout.dp
        micro_steps = next(number for number in itertools.count(1) if layout.fits_schedule(number))
        return layout.dp * micro_steps * (self.micro_batch or 1)


def fixed_micro_steps(profile: ModelProfile) -> int | None:
    """Forwards a step of a model whose result depends on which samples share one, where nobody says (law 2)."""
    return 1 if profile.stateful or profile.coupled else None


def choose_precisions(given: str | None, cluster: Cluster, source: str = "") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The precisions that are open, and the note that says why.

    Args:
        given: as the user wrote it: a precision, several with commas, `any`, or None.
        source: who says `given`, where it is not the user at this command.

    Raises:
        ConfigError: none of them is one that the device multiplies.
    """
    rates = cluster.device.peak_flops
    usual = ("bfloat16", "float16", "float32")
    if given is not None:
        named = usual if given == "any" else tuple(dict.fromkeys(part.strip() for part in given.split(",")))
        open_ones = tuple(name for name in named if name in rates)
        if not open_ones:
            device = cluster.device.name
            whose = f", which {source} name" if source else ""
            raise ConfigError(
                f"precision {given}{whose}: {device} multiplies {', '.join(rates)}; name one of these, or any"
            )
        said = [f"precision {given}, because {source} name it"] if source else []
        if given != "any" and (left := [name for name in named if name not in rates]):
            what = f"precision {' and '.join(left)} left out"
            said.append(f"{what}, because {cluster.device.name} multiplies {', '.join(rates)} alone")
        return open_ones, tuple(said)
    for name in usual[:2]:
        if rates.get(name, 0.0) >= WORTH_LOWERING * rates.get("float32", 0.0):
            return (name,), (_say_precision(name, cluster),)
    only = "float32" if "float32" in rates else next(iter(rates))
    return (only,), (f"precision {only}, because {cluster.device.name} is hardly faster in a lower one",)


def _say_precision(name: str, cluster: Cluster) -> str:
    rates = cluster.device.peak_flops
    if not rates.get("float32"):
        return f"precision {name}, because it is what {cluster.device.name} multiplies fastest"
    times = rates[name] / rates["float32"]
    return f"precision {name}, because {cluster.device.name} multiplies it {times:.2g} times as fast as float32"


def usual_batch(seq: int) -> tuple[int, str]:
    """The global batch of a model by name where nobody gives one, and the note that says so.

    The power of two that is nearest to so many tokens: data-parallel ranks and pipelines divide it.
    """
    size = 2 ** max(0, round(math.log2(TOKENS_PER_STEP / max(1, seq))))
    return size, f"global batch {size}, because that is about {size * seq / 1e6:.1f}M tokens a step of {seq} each"
