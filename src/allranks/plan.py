"""Plan and Estimate: what a Layout costs on a Cluster, and which one was chosen among which others, because of what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from allranks.layout import Layout
from allranks.upkeep import Upkeep


@final
@dataclass(frozen=True, slots=True)
class Span:
    """A figure with its 90% interval."""

    low: float
    expected: float
    high: float


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration that a search may take: everything that a run needs besides Task and Cluster.

    Attributes:
        layout: degrees and modes.
        micro_batch: samples per forward and data-parallel rank.
        precision: as `train.precision`.
        chunks: model chunks a pipeline rank holds (virtual stages; 1 is no interleaving).
        upkeep: the same for all that a search weighs.
    """

    layout: Layout
    global_batch: int
    micro_batch: int
    precision: str = "bfloat16"
    chunks: int = 1
    upkeep: Upkeep = field(default_factory=Upkeep, hash=False)

    @property
    def micro_steps(self) -> int:
        """Forwards per optimizer step on one data-parallel rank."""
        return -(-self.global_batch // (self.layout.dp * self.micro_batch))


@final
@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one rank at the step's peak, by category."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    communication: float = 0.0
    framework: float = 0.0

    @property
    def total(self) -> float:
        """Of all categories."""
        kept = self.weights + self.gradients + self.optimizer + self.activations
        return kept + self.logits + self.gathered + self.communication + self.framework


@final
@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by cause, on the slowest rank; communication counts what overlap does not hide."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    data: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    input: float = 0.0
    checkpoint: float = 0.0

    @property
    def work(self) -> float:
        """Of all causes but the waits for samples and checkpoints."""
        work = self.compute + self.recompute + self.optimizer + self.offload
        return work + self.tensor + self.context + self.expert + self.data + self.pipeline + self.bubble

    @property
    def total(self) -> float:
        """Of all causes."""
        return self.work + self.input + self.checkpoint


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends on one axis in one optimizer step.

    Attributes:
        axis: as in a layout; link: the name of the Link that carries it.
        sent_bytes: by one rank; count: of collectives; seconds: all of it, hidden_seconds: behind computation.
    """

    axis: str
    link: str
    sent_bytes: float
    count: int
    seconds: float
    hidden_seconds: float


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """What a Choice costs.

    Attributes:
        memory: on the fullest rank; stages: (stage, memory) of the first, middle and last where there is a pipeline.
        peak_bytes, step_seconds: with their 90% intervals; capacity_bytes: what a device has for the process.
        mfu: model FLOPs (forward and backward once, without recomputation; attention not halved) over the peak.
        samples_per_second, tokens_per_second: of the whole cluster.
        correction: by which the seconds of work, not of waits, were multiplied, because runs on this machine took so.
        fault: what a dry run says that a run would fail by; "" where it has found nothing, or nobody made one.
        host_bytes, host_capacity_bytes: what the processes of a node keep in its memory, `copied_bytes` of it copies of
            checkpoints, and what there is of it for them; None where nobody knows.
    """

    choice: Choice
    memory: MemoryUse
    stages: Mapping[int, MemoryUse]
    peak_bytes: Span
    capacity_bytes: float
    time: StepTime
    step_seconds: Span
    traffic: tuple[Traffic, ...]
    mfu: float
    samples_per_second: float
    tokens_per_second: float
    host_bytes: float = 0.0
    host_capacity_bytes: float | None = None
    copied_bytes: float = 0.0
    correction: float = 1.0
    fault: str = ""

    @property
    def fits(self) -> bool:
        """Whether the expected peak, with what the interval adds, stays below the capacity, and the host has room.

        What would fail for another reason fits nowhere.
        """
        return self.peak_bytes.high <= self.capacity_bytes and self.fits_host and not self.fault

    @property
    def fits_host(self) -> bool:
        """Whether what is moved to the host has room there."""
        return self.host_capacity_bytes is None or self.host_bytes <= self.host_capacity_bytes

    @property
    def may_fit(self) -> bool:
        """Whether the interval of the peak holds the capacity, and nothing else fails: neither is certain."""
        return self.peak_bytes.low <= self.capacity_bytes < self.peak_bytes.high and self.fits_host and not self.fault


@final
@dataclass(frozen=True, slots=True)
class Refusal:
    """A Choice, or a family of them, that a named rule does not let in."""

    rule: str
    layout: str
    because: str


@final
@dataclass(frozen=True, slots=True)
class Ranked:
    """An Estimate in its place, with the one line that says why there.

    Attributes:
        family: the plain strategy that it is the best of ("ddp", "fsdp" ...); "" where its own figures give its place.
    """

    estimate: Estimate
    because: str
    family: str = ""


@final
@dataclass(frozen=True, slots=True)
class Checked:
    """What a dry run said of one configuration.

    Attributes:
        planned: what was estimated; corrected: the same with what was counted, None where no dry run could be made.
        because: one line: what was counted, or why nothing could be.
        traffic: axis -> counted bytes over planned ones, where they differ.
    """

    planned: Estimate
    corrected: Estimate | None
    because: str
    traffic: Mapping[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> Literal["stands", "dropped", "not checked"]:
        """Whether it fits by what was counted."""
        if self.corrected is None:
            return "not checked"
        return "stands" if self.corrected.fits else "dropped"


@final
@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change, and what it does to the best.

    Attributes:
        change: as a user writes it, "recompute=full".
        estimate: the best with that change alone; None where it is refused.
        because: the difference in memory and time, or the reason of the refusal.
    """

    change: str
    estimate: Estimate | None
    because: str


@final
@dataclass(frozen=True, slots=True)
class Bill:
    """What a number of tokens takes: time, and where somebody gave price and watts, money and energy.

    Attributes:
        tokens: to train on; samples of a model without tokens.
        steps: optimizer steps; seconds: all of them, without failures.
        device_hours: of all devices together.
        money, kilowatt_hours: None where nobody knows price or watts; because says so, or where they come from.
    """

    tokens: float
    steps: int
    seconds: Span
    device_hours: float
    money: Span | None
    currency: str
    kilowatt_hours: Span | None
    because: str

    @property
    def days(self) -> float:
        """As expected."""
        return self.seconds.expected / 86400


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The best, its runners-up (the Pareto front of time and memory first), and who was refused.

    Attributes:
        machine: `Cluster.machine`.
        model, cluster: their names; num_devices of the latter, on so many equal nodes; parameters of the former.
        seq: positions of a sample; 0 where it has none.
        searched: how many Choices were estimated.
        best: None where nothing fits; closest: then what came nearest; offloaded: then the fastest that fits with
            parameters in the host's memory.
        what_ifs: one change each, of the best or the closest.
        bill: of the best, where a number of tokens was given.
        notes: what was decided for the user, and why.
        unmet: limits of time or money that the best does not keep, one line each.
        checked: what dry runs said, where they were asked for.
    """

    model: str
    cluster: str
    searched: int
    best: Ranked | None
    others: tuple[Ranked, ...]
    refusals: tuple[Refusal, ...]
    closest: Ranked | None = None
    notes: tuple[str, ...] = field(default=())
    num_devices: int = 1
    nodes: int = 1
    parameters: int = 0
    seq: int = 0
    what_ifs: tuple[WhatIf, ...] = ()
    bill: Bill | None = None
    unmet: tuple[str, ...] = ()
    machine: str = ""
    checked: tuple[Checked, ...] = ()
    offloaded: Ranked | None = None

    @property
    def leading(self) -> Ranked | None:
        """The best, or where nothing fits what came nearest."""
        return self.best or self.closest
