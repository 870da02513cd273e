"""How a step is cut (law 2): first into consecutive micro-steps, then each micro-step over the data ranks."""

from dataclasses import dataclass
from functools import lru_cache

from allranks.config_sections import TrainConfig
from allranks.errors import ConfigError, LayoutError
from allranks.even_cut import MOST_MICRO_STEPS, divisors
from allranks.layout import Layout

Span = tuple[int, int]

ROUNDS = 2  # micro-steps for each stage of a pipeline, where the user does not say how many


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of every step of a run: a pure function of sizes.

    Attributes:
        global_batch: samples per optimizer step over the whole world.
        num_ranks: D = dp_replicate * dp_shard.
        micro_batch: samples per forward per dp rank; None: the whole share at once.
        micro_steps: M where it is fixed (batch statistics, coupled losses); it then never depends on num_ranks or
            micro_batch.
        least: samples of a forward in a short last step, if it has so many; fewer forwards go before smaller ones.
    """

    global_batch: int
    num_ranks: int = 1
    micro_batch: int | None = None
    micro_steps: int | None = None
    least: int = 1

    def __post_init__(self) -> None:
        """Refuses what cannot be cut: LayoutError for fewer samples than ranks, ConfigError for the rest."""
        for name, value in (
            ("global_batch", self.global_batch),
            ("micro_batch", self.micro_batch),
            ("micro_steps", self.micro_steps),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"train.{name}={value}, but it has to be at least 1")
        assert self.num_ranks >= 1
        if self.global_batch < self.num_ranks:
            raise LayoutError(
                f"train.global_batch({self.global_batch}) < dp_replicate * dp_shard({self.num_ranks}): "
                f"{self.num_ranks - self.global_batch} ranks would never see a sample; "
                f"set train.global_batch={self.num_ranks} or more, or use {self.global_batch} processes"
            )
        if self.micro_steps is not None and self.micro_steps > self.global_batch:
            raise ConfigError(
                f"train.micro_steps({self.micro_steps}) > train.global_batch({self.global_batch}): "
                f"a micro-step would have no sample; set train.micro_steps={self.global_batch} or less"
            )
        if self.num_micro_steps() > MOST_MICRO_STEPS:
            raise ConfigError(
                f"a step of train.global_batch={self.global_batch} has {self.num_micro_steps():,} micro-steps, and can "
                f"have {MOST_MICRO_STEPS:,}: make train.micro_batch larger, train.micro_steps or the batch smaller"
            )

    def num_micro_steps(self, size: int | None = None) -> int:
        """M of a step of `size` samples (None: a full one). A short last step has micro-steps of `least` at least."""
        size = self.global_batch if size is None else size
        if self.micro_steps is not None:
            return self.micro_steps if size == self.global_batch else min(self.micro_steps, max(1, size // self.least))
        if self.micro_batch is None:
            return 1
        return -(-size // (self.num_ranks * self.micro_batch))

    def spans(self, size: int, dp_rank: int) -> list[Span]:
        """This rank's part of each of the M micro-steps of a step of `size` samples: (offset in the step, length).

        Length 0 is a filler, and its offset that of its micro-step's first sample. The parts of the ranks follow one
        another in rank order; in one micro-step they differ by at most one sample, and so do the ranks' shares of the
        whole step.
        """
        assert 1 <= size <= self.global_batch and 0 <= dp_rank < self.num_ranks
        return list(_spans(size, self.num_micro_steps(size), self.num_ranks, dp_rank))


def cut_step(train: TrainConfig, layout: Layout, *, fixed: bool = False) -> Cut:
    """How the steps of a run are cut.

    Args:
        fixed: whether M is the same whatever the number of ranks: with batch statistics, or a coupled loss.

    Raises:
        ConfigError: keys contradict each other. LayoutError: the step does not go through the layout's pipeline.
    """
    if train.micro_steps is not None and train.micro_batch is not None:
        raise ConfigError(
            f"train.micro_steps={train.micro_steps} and train.micro_batch={train.micro_batch} both say how a step is "
            "cut: give one of them"
        )
    if fixed and train.micro_batch is not None:
        raise ConfigError(
            f"train.micro_batch={train.micro_batch}: this task's result depends on which samples share a forward, so "
            "the number of forwards has to be fixed: set train.micro_steps instead"
        )
    micro_steps = (train.micro_steps or 1) if fixed else train.micro_steps
    if layout.pp > 1:
        return _cut_for_pipeline(train, layout, micro_steps)
    return Cut(train.global_batch, layout.dp, train.micro_batch, micro_steps)


def samples_a_forward(train: TrainConfig, layout: Layout) -> int:
    """At most so many samples has a forward, as far as the keys tell: more would not be trained on at once."""
    share = -(-train.global_batch // layout.dp)
    return train.micro_batch or -(-share // (train.micro_steps or 1))


def _cut_for_pipeline(train: TrainConfig, layout: Layout, micro_steps: int | None) -> Cut:
    """A cut into micro-steps of one shape, as many as the schedule takes."""
    batch, dp = train.global_batch, layout.dp
    Cut(batch, dp)  # fewer samples than ranks have their own message
    share, left = divmod(batch, dp)
    if left:
        near = f"train.global_batch={batch - left} or {batch - left + dp}"
        raise LayoutError(
            f"pp={layout.pp} passes micro-steps of one shape on, and train.global_batch({batch}) over "
            f"dp_replicate * dp_shard({dp}) leaves {left}: {near} fits"
        )
    fits = [m for m in divisors(share) if layout.fits_schedule(m)]
    if train.micro_batch is not None:
        asked, written = -(-share // train.micro_batch), f"train.micro_batch={train.micro_batch}"
        asked = asked if share % train.micro_batch == 0 else 0
    else:
        asked, written = micro_steps or 0, f"train.micro_steps={micro_steps}"
    if not fits:
        needed = layout.num_stages
        raise LayoutError(
            f"pp={layout.pp} needs at least {needed} micro-steps of one shape, and train.global_batch({batch}) gives a "
            f"data-parallel rank {share} samples: set train.global_batch={needed * dp} or a multiple of it"
        )
    if train.micro_batch is None and micro_steps is None:
        enough = [m for m in fits if m >= ROUNDS * layout.num_stages]
        asked = enough[0] if enough else fits[-1]
    if asked not in fits:
        near = ", ".join(str(m) for m in sorted(fits, key=lambda m: abs(m - asked))[:3])
        raise LayoutError(
            f"{written} does not cut {share} samples into micro-steps of one shape that schedule={layout.schedule} "
            f"takes over {layout.num_stages} stages: train.micro_steps can be {near}"
        )
    return Cut(batch, dp, share // asked, asked)


@lru_cache(maxsize=64)
def _spans(size: int, num_micro_steps: int, num_ranks: int, dp_rank: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    offset = dealt = 0
    base, larger = divmod(size, num_micro_steps)
    for micro_step in range(num_micro_steps):
        length = base + (micro_step < larger)
        whole, extras = divmod(length, num_ranks)
        # The samples left over are dealt in turn, beginning where the last micro-step stopped: else the first ranks
        # would get every one of them, and the last ranks of a small batch none at all.
        first, past = dealt % num_ranks, dealt % num_ranks + extras
        mine = whole + ((dp_rank - first) % num_ranks < extras)
        extras_before = max(0, min(dp_rank, past) - first) + max(0, min(dp_rank, past - num_ranks))
        spans.append((offset + whole * dp_rank + extras_before, mine) if mine else (offset, 0))
        offset += length
        dealt += extras
    return tuple(spans)
