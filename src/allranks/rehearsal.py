"""Rehearsal: what one step of the real program did on ranks that were not there. Values only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, final

from allranks.rehearsed_messages import Collective, Message, Transfer

Category = Literal["weights", "gradients", "optimizer", "activations", "logits", "gathered", "communication", "other"]
CATEGORIES: tuple[Category, ...] = (
    *("weights", "gradients", "optimizer", "activations", "logits", "gathered", "communication", "other"),
)
Answer = Literal["fits", "does not fit", "unknown"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """Something that would have gone wrong, or may.

    Attributes:
        kind: a short name for programs.
        what: one line: what, where; next: the move that mends it.
        fails: whether the run would fail or hang by it.
    """

    kind: str
    what: str
    next: str
    fails: bool = False

    def __str__(self) -> str:
        return f"{self.what}; {self.next}"


@final
@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that a module (equal blocks together, "layers.*") holds at the peak, of one category."""

    module: str
    category: str
    bytes: int


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of the step: what was done, and the memory at its end and at most.

    Attributes:
        phase: "forward", "backward" or "update"; what: "gather", "compute", "drop", or the collective.
        unit: the module or group; num_bytes: that travel or are dropped; live_bytes, highest_bytes: in use.
        live_by_category: of what. times: how many equal stretches follow one another here.
    """

    phase: str
    what: str
    unit: str
    num_bytes: int
    live_bytes: int
    highest_bytes: int
    times: int = 1
    live_by_category: Mapping[Category, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One thing in a stretch of work: FLOPs, a message, or (neither) a wait.

    Attributes:
        flops: that are computed; message: (axis, op, bytes) of what travels.
        unit: whose parameters the message gathers; "" where it gathers none. A wait is for the oldest unit that is
            asked for and that nothing has waited for.
    """

    flops: float = 0.0
    message: tuple[str, str, int] | None = None
    unit: str = ""


@final
@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of the step as work: what is computed and what travels in it.

    Attributes:
        phase, block: which; "" is outside of all blocks.
        parts: of one such stretch, in order; times: how many follow one another.
        turn: the same for what belongs to one forward or one backward of a micro-step through a stage; it rises.
    """

    phase: str
    block: str
    parts: tuple[Part, ...]
    times: int = 1
    turn: int = 0


@final
@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """One rank's step in its steady state.

    Attributes:
        rank, stage: in the world; the first stage of a pipeline that it runs.
        peak_bytes: the most memory in use at once; by_category: of what, at that moment; at: which moment that was.
        holdings: of what module, at that moment; the largest first.
        resting_bytes: in use between two steps.
        collectives: in the order in which their kinds first came.
        sequence: every collective of the traced step, in order.
        flops: floating-point operations, what is computed again counted again.
        moments: the step, stretch by stretch.
        works: the same as work, in order: with what stands for several micro-steps as often as it happens.
        micro_steps: forwards of the step; traced_micro_steps: those that were traced.
        traced: blocks that were traced; blocks: that there are.
        host_peak_bytes, host_by_category: the same of what waits in the host's memory; transfers: what crosses.
    """

    rank: int
    stage: int
    peak_bytes: int
    by_category: Mapping[str, int]
    at: str
    holdings: tuple[Holding, ...]
    resting_bytes: int
    collectives: tuple[Collective, ...]
    sequence: tuple[Message, ...]
    flops: float
    findings: tuple[Finding, ...] = ()
    moments: tuple[Moment, ...] = ()
    works: tuple[Work, ...] = ()
    micro_steps: int = 1
    traced_micro_steps: int = 1
    traced: int = 0
    blocks: int = 0
    host_peak_bytes: int = 0
    host_by_category: Mapping[str, int] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()

    def to_json(self, *, timeline: bool = False) -> dict[str, object]:
        """What `dryrun --json` says of it; its moments where the timeline is asked for."""
        moments = {"moments": [asdict(one) for one in self.moments]} if timeline else {}
        return {
            "peak_bytes": self.peak_bytes,
            "by_category": dict(self.by_category),
            "collectives": [asdict(one) for one in self.collectives],
            "flops": self.flops,
            "findings": [asdict(one) for one in self.findings],
            "stage": self.stage,
            "at": self.at,
            "holdings": [asdict(one) for one in self.holdings],
            "resting_bytes": self.resting_bytes,
            "micro_steps": self.micro_steps,
            "blocks": {"traced": self.traced, "all": self.blocks},
            "host_peak_bytes": self.host_peak_bytes,
            "host_by_category": dict(self.host_by_category),
            "transfers": [asdict(one) for one in self.transfers],
            **moments,
        }


@final
@dataclass(frozen=True, slots=True)
class Remedy:
    """One change and what a dry run of it has.

    Attributes:
        change: a config key with its value, or "--layout L".
        peak_bytes: on the fullest of the ranks that were rehearsed with it, one of each stage that was rehearsed
            without it; None: the change is refused, `because` says why.
        slower: the part by which a step takes longer, 0.3 for 30%; below 0: it is faster; None: nobody knows.
        by: what says so: "estimate" (the planner's) or "FLOPs" (counted).
        margin_bytes: that have to stay free beside the peak, which is more where the change leaves more fragments.
        fits: whether it fits then, in the device's memory and in the host's; None: the change is refused.
    """

    change: str
    peak_bytes: int | None
    because: str = ""
    slower: float | None = None
    by: str = ""
    margin_bytes: float = 0.0
    fits: bool | None = None


@final
@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A dry run: its ranks, and whether they fit.

    Attributes:
        model, cluster, layout: names; world_size: processes.
        capacity_bytes: what a device has for the process; margin_bytes: what is kept free of it for what nobody sees
            here (the allocator's fragments, the context, communication buffers).
        findings: of all ranks together.
        decisions: what was decided on the way, each with its because.
        unrehearsed: what no dry run on a processor can check, one line each.
        host_capacity_bytes: of its host's memory, for what waits there of one process; None: nobody knows.
        host_bandwidth: of the link between a device and its host, bytes/s in each direction; None: nobody knows.
        between_stages: stage -> bytes (that it is sent for a micro-step, of the gradients that it sends back), as far
            as they are known.
    """

    model: str
    cluster: str
    layout: str
    world_size: int
    ranks: Mapping[int, RankRehearsal]
    capacity_bytes: float
    margin_bytes: float
    findings: tuple[Finding, ...] = ()
    decisions: tuple[str, ...] = ()
    unrehearsed: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = field(default=())
    host_capacity_bytes: float | None = None
    host_bandwidth: float | None = None
    between_stages: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(rank.peak_bytes for rank in self.ranks.values())

    @property
    def free_bytes(self) -> float:
        """What is left on the fullest rank beside peak and margin; below 0: it does not fit."""
        return self.capacity_bytes - self.margin_bytes - self.peak_bytes

    @property
    def host_peak_bytes(self) -> int:
        """Of the rank that keeps most in its host's memory."""
        return max(rank.host_peak_bytes for rank in self.ranks.values())

    @property
    def fits(self) -> bool:
        """Whether device and, where its size is known, host have room."""
        there = self.host_capacity_bytes is None or self.host_peak_bytes <= self.host_capacity_bytes
        return self.free_bytes >= 0 and there

    @property
    def next_move(self) -> str:
        """What to do where it does not fit and nothing was tried yet; "" elsewhere: a finding has its own move."""
        if self.fits or self.fails or self.remedies:
            return ""
        if self.free_bytes < 0:
            return "--remedies rehearses changes that save memory, and says what each costs of speed"
        return "let less wait on the host (--layout ...,offload=...), or cut it over more ranks (dp_shard)"

    @property
    def fails(self) -> bool:
        """Whether a finding says that the run would fail."""
        own = (finding for rank in self.ranks.values() for finding in rank.findings)
        return any(finding.fails for finding in (*self.findings, *own))

    def to_json(self, *, timeline: bool = False) -> dict[str, object]:
        """What `dryrun --json` prints, with each rank's moments where the timeline is asked for."""
        return {
            "model": self.model,
            "cluster": self.cluster,
            "layout": self.layout,
            "world_size": self.world_size,
            "fits": self.fits,
            "capacity_bytes": self.capacity_bytes,
            "margin_bytes": self.margin_bytes,
            "free_bytes": self.free_bytes,
            "peak_bytes": self.peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "host_capacity_bytes": self.host_capacity_bytes,
            "host_bandwidth": self.host_bandwidth,
            "ranks": {str(rank): told.to_json(timeline=timeline) for rank, told in self.ranks.items()},
            "findings": [asdict(finding) for finding in self.findings],
            "decisions": list(self.decisions),
            "unrehearsed": list(self.unrehearsed),
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "next": self.next_move,
        }
