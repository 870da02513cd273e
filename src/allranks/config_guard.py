"""The keys of the section guard: what watches over a run, and what it does then."""

from typing import Annotated, Literal, final

from pydantic import Field, model_validator

from allranks.config_sections import Count, CountOrZero, Section, key

SENTINELS = (
    *("replicas", "shards", "samples", "randomness", "linkage", "schedule", "steps", "checkpoint"),
    "gradients",
)
"""What watches over every run, by the names that `guard.mute` takes."""
_NAMES = ", ".join(SENTINELS)
LEAST_WAIT_SECONDS = 600.0


@final
class GuardConfig(Section):
    """What watches over the workers that `allranks train` starts and over their steps, and what it does then."""

    hang: Literal["restart", "stop", "report"] = key(
        "restart", "what follows when workers hang: start them again, end with 93, or only say so"
    )
    hang_seconds: float | None = key(
        None,
        "without progress in a step: that long is a hang; not given: five times what steps take here, at least 15",
        unit="s",
        gt=0,
    )
    slow_rank: Literal["warn", "off"] = key(
        "warn",
        "what follows where one rank of a host keeps the others waiting in every step: a verdict, or nobody looks",
    )
    bad_link: Literal["warn", "off"] = key(
        "warn",
        "several hosts: what follows where a way between two of them loses what is sent, is far or is slow: a verdict, "
        "or nobody looks",
    )
    stopped_seconds: float = key(10.0, "how long a process may be stopped (SIGSTOP)", unit="s", gt=0)
    input_seconds: float = key(
        600.0, "without a batch of data: that long is a hang; it is told of as early as others", unit="s", gt=0
    )
    first_step_seconds: float = key(
        1800.0, "from the start of a worker to the end of its first step, compilation included", unit="s", gt=0
    )
    compilation_seconds: float = key(
        1800.0, "for what torch.compile compiles in a later step (a batch of another shape)", unit="s", gt=0
    )
    evaluation_seconds: float = key(
        1800.0, "between two batches of an evaluation; also after the last step", unit="s", gt=0
    )
    checkpoint_seconds: float = key(1800.0, "for writing one checkpoint", unit="s", gt=0)
    stop_seconds: float = key(
        60.0,
        "after a request to stop: how long workers may take to finish the step and save before they are killed",
        unit="s",
        gt=0,
    )
    restarts: CountOrZero = key(
        3, "restarts in a row that finish no further step, before the run ends with 93; 0: none", unit="restarts"
    )
    host_seconds: float = key(
        11.5, "several hosts: without a sign of life of a host's command: that long, and it is lost", unit="s", ge=3
    )
    join_seconds: float = key(
        600.0, "several hosts: how long they wait for those that are missing, at the start and later", unit="s", gt=0
    )
    nonfinite: Literal["skip", "stop"] = key(
        "skip", "what follows a step whose gradients are not finite and which so changes nothing: go on, or end with 93"
    )
    nonfinite_limit: Count = key(10, "so many such steps in a row end the run with 93", unit="steps")
    digest_every: CountOrZero = key(
        200,
        "steps between two comparisons of what ranks must have alike, the first after the first step, "
        "and copies before each save, too; 0: never",
        unit="steps",
    )
    recompute_every: CountOrZero = key(
        0,
        "steps between two looks at whether a device computes the gradients that another one computes from the same "
        "samples: two passes of one micro-step each; 0: never",
        unit="steps",
    )
    on_finding: Literal["stop", "warn"] | None = key(
        None,
        "what follows a finding of a sentinel: end with 93 before more is saved, or a warning; not given: stop where "
        "the state of the run is wrong already, else warn",
    )
    data: Literal["stop", "warn", "off"] = key(
        "stop",
        "what follows where one of a few samples is another one than on rank 0, or than when a checkpoint was written: "
        "refused, a warning, or nobody looks",
    )
    mute: str = key("", f"sentinels that look at nothing, with commas between: {_NAMES}")
    spike: Literal["off", "log", "skip", "rollback"] = key(
        "log",
        "what follows a loss or gradient norm that is a spike: nothing, a verdict, (of a norm) no update, (of a loss) "
        "back to the newest checkpoint and around the samples",
    )
    spike_threshold: float = key(10.0, "robust deviations above the median from which a value is a spike", gt=0)
    spike_window: Annotated[int, Field(ge=2, le=1000)] = key(
        100, "steps whose median and deviation a value is compared with", unit="steps"
    )
    spike_times: CountOrZero = key(
        3, "under skip and rollback: so many spikes are left out in a run, at most", unit="spikes"
    )
    spike_after: Literal["stop", "log"] = key(
        "stop", "under rollback: what follows one spike more: the end with 93, or a verdict"
    )

    @property
    def muted(self) -> tuple[str, ...]:
        """The names in `mute`."""
        return tuple(filter(None, (name.strip() for name in self.mute.split(","))))

    @property
    def longest_wait(self) -> float:
        """Seconds that a rank may wait in a collective for another one that does no more than it may."""
        phases = (self.first_step_seconds, self.compilation_seconds, self.evaluation_seconds, self.checkpoint_seconds)
        return max(LEAST_WAIT_SECONDS, self.input_seconds, self.hang_seconds or 0.0, *phases) + 60.0

    @property
    def elsewhere_seconds(self) -> float:
        """How long nothing may come further in a second place for checkpoints, before it is left for now: so much less
        than a hang takes that the run sees it first.
        """
        return min(self.first_step_seconds, self.checkpoint_seconds) / 2

    @model_validator(mode="after")
    def _know_the_muted(self) -> "GuardConfig":
        for name in self.muted:
            if name not in SENTINELS:
                raise ValueError(f"guard.mute={self.mute}: no sentinel is called {name!r}; there are {_NAMES}")
        return self
