"""What one process did, as values that can be judged: tensors by logical name, samples, randomness, settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch

from allranks.parameter_map import Box

FEWEST_FOR_TWO_SAVES = 4


class Part(NamedTuple):
    """What a process holds of a tensor.

    Attributes:
        box: where it lies in the whole; None where only a comparison of values can tell (a part cut by hand).
        value: a copy, on the CPU.
    """

    box: Box | None
    value: torch.Tensor


Parts = dict[str, Part]


class Draw(NamedTuple):
    """Random numbers for one dropout, or noise with a row for each of the samples in work.

    Attributes:
        state: digest of the generator before it.
        shape: of what was dropped or drawn.
        again: whether a recomputation during the backward drew them.
        own: whether it is such noise, of a generator of the program's own.
        probability: of a dropout.
        shared: whether it is such noise, of the generator that torch's operations share.
    """

    state: int
    shape: tuple[int, ...]
    again: bool
    own: bool = False
    probability: float = 0.0
    shared: bool = False

    @property
    def noise(self) -> bool:
        """Whether it is no dropout."""
        return self.own or self.shared

    @property
    def single(self) -> bool:
        """Whether it is noise of one number for each sample."""
        return self.noise and len(self.shape) == 1


class Call(NamedTuple):
    """What a module is given in a forward, or gives, by numbers that do not depend on the order of its samples.

    Attributes:
        what: the module's name, which of both, and the shapes of the tensors.
        values: of each of them two, see `given.told`.
    """

    what: str
    values: tuple[float, ...]


@final
@dataclass
class Forwards:
    """The forwards of a step's modules.

    Attributes:
        calls: what is compiled tells nothing of those inside.
        unseen: whether of some module that holds parameters no call was noted.
    """

    calls: list[Call] = field(default_factory=list)
    unseen: bool = True


@final
@dataclass
class StepRecord:
    """One optimizer step as one process saw it.

    Attributes:
        loss: what the step returned, None where that is no number.
        rows: digests of the samples that were fed, in their order.
        packed: whether a batch has no row for each of its samples: `rows` has one digest of all of it.
        values: of a Task, whose rows are places in the order: (digest of its shapes, of its values) by row, where a
            batch has a row for each sample.
        batch_sizes: samples of each micro-batch that was fed; a filler has none.
        raw: gradients before clipping, where torch's clipping was called.
        gradients: gradients as the optimizer found them.
        norm: as torch's clipping had it.
        settings: of every param_group as the optimizer found it (lr, weight_decay, ...).
        groups: of an own loop, the parameters of each of them.
        updates: calls of optimizer.step.
        parameters, buffers, state: after the step; optimizer state as "exp_avg.NAME".
        draws: dropouts, and noise with a row for each sample, in their order.
        seeds: digests of the generators (torch, numpy, python) before the step's batches were made.
        drew: whether making them drew random numbers of torch, numpy, python.
        kept: what `state` of the program gives.
        past: of an own loop, names of the modules that spread the model and were not called (wrapper_watch.py).
    """

    loss: float | None = None
    rows: list[int] = field(default_factory=list)
    packed: bool = False
    values: dict[int, tuple[int, int]] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = ()
    raw: Parts = field(default_factory=dict)
    gradients: Parts = field(default_factory=dict)
    norm: float | None = None
    settings: list[dict[str, float]] = field(default_factory=list)
    groups: list[frozenset[str]] = field(default_factory=list)
    updates: int = 0
    parameters: Parts = field(default_factory=dict)
    buffers: Parts = field(default_factory=dict)
    state: Parts = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)
    seeds: tuple[int, ...] = ()
    drew: tuple[bool, ...] = ()
    kept: Parts = field(default_factory=dict)
    past: tuple[str, ...] = ()

    @property
    def drawn(self) -> list[Draw]:
        """What its forwards have drawn."""
        return [draw for draw in self.draws if not draw.again]

    @property
    def drawn_otherwise(self) -> list[Draw]:
        """What recomputations have drawn from states from which no forward has."""
        seen = {draw.state for draw in self.drawn}
        return [draw for draw in self.draws if draw.again and draw.state not in seen]


@final
@dataclass
class Start:
    """A model and its optimizer before the first step.

    Attributes:
        tied: names that share one tensor.
        unlinked: trainable parameters that no optimizer holds.
        statistics: modules whose statistics depend on the batch.
        optimizers: class names.
        gathered: of what fully_shard has cut, over which ranks it is gathered before it is computed with.
    """

    parameters: Parts = field(default_factory=dict)
    buffers: Parts = field(default_factory=dict)
    tied: list[tuple[str, ...]] = field(default_factory=list)
    unlinked: list[str] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    gathered: dict[str, tuple[int, ...]] = field(default_factory=dict)


@final
@dataclass
class RunRecord:
    """What one process did from its start on.

    Attributes:
        start: before the first step.
        steps: one by one.
        evaluation: name -> value, as the program measured it.
        keeps: whether an own loop has a `state`, whatever that gives.
        evaluated: digests of the samples that it was measured on; evaluated_packed: as a step's `packed`.
        first: the number of the first of them: 0, or that of the step which a load has gone on with.
        saved_before: the step before which it was saved; 0: it was not.
        resumed: the same steps once more, from that save on; None where nobody has loaded it.
        repeated_epochs: epochs that a shuffling sampler has begun once more, without having been told of the next.
        redrawn: lengths of permutations that were drawn more than once with the same values while the data was made.
        compiled: whether some dropouts are compiled, and tell nothing.
        given: of several ranks, the forwards of the first step (given.py).
        stateful: whether the first step's forwards have moved buffers that are no statistics of a batch (a counter, the
            vectors of a spectral norm): what is computed then depends on how many forwards a step has.
        unclaimed: shapes of what was drawn for no samples while some were in work (observer.py).
        error: why the process could not go on, in one line; "" where it could.
    """

    start: Start = field(default_factory=Start)
    steps: list[StepRecord] = field(default_factory=list)
    evaluation: dict[str, float] | None = None
    keeps: bool = False
    evaluated: list[int] = field(default_factory=list)
    evaluated_packed: bool = False
    first: int = 0
    saved_before: int = 0
    resumed: "RunRecord | None" = None
    repeated_epochs: list[int] = field(default_factory=list)
    redrawn: list[int] = field(default_factory=list)
    compiled: bool = False
    given: Forwards = field(default_factory=Forwards)
    stateful: bool = False
    unclaimed: set[tuple[int, ...]] = field(default_factory=set)
    error: str = ""

    @property
    def last_saved(self) -> "RunRecord":
        """The run that has made the newest save: this one, or what was resumed from it."""
        later = self.resumed
        return later.last_saved if later is not None and later.saved_before else self


def saves_of(num_steps: int) -> tuple[int, ...]:
    """The steps before which a run is saved: in the middle; and where there are four, once more after a load of that.

    A load that is right can be followed by a save that is wrong: the position in the data that a process counts from
    its own start, say. Only a second load shows it.
    """
    middle = max(1, num_steps // 2)
    return (middle,) if num_steps < FEWEST_FOR_TWO_SAVES else (middle, middle + 1)


@final
@dataclass(frozen=True)
class Noise:
    """That one device does not compute the same twice.

    Attributes:
        difference: the first one between two runs, in words.
        seeded: whether runs with the same seeds are equal, and only those with other seeds differ.
        operations: what was seen to draw random numbers, or to give others each time; empty where nothing was.
    """

    difference: str
    seeded: bool
    operations: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class OneDevice:
    """What one process computes alone, and how far rounding alone moves it.

    Attributes:
        run: the run.
        variants: the same run again, with what changes nothing but the rounding (variants.py).
        shares: step -> rank -> micro-batch -> gradients of it alone, from the parameters before that step.
        noise: why it is nothing to compare with; None where the run is the same again, with other random numbers too.
        too_small: which step of an own loop has fewer samples than ranks, in words; "" where none has.
        whole_validation: samples that a Task's validation split has, where fewer were measured; 0: all were.
        lowered: a low precision in which an own loop computes that runs in its own precision alone; None: in none.
        lowest: the least precise type in which an own loop computes, in whichever precision it is run.
        notes: what was seen of it that limits or explains the comparison, in words.
    """

    run: RunRecord
    variants: Sequence[RunRecord] = ()
    shares: Mapping[int, Sequence[Sequence[Mapping[str, torch.Tensor]]]] = field(default_factory=dict)
    noise: Noise | None = None
    too_small: str = ""
    whole_validation: int = 0
    lowered: torch.dtype | None = None
    lowest: torch.dtype = torch.float64
    notes: tuple[str, ...] = ()
