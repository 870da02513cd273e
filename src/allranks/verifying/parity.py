"""Does the spread run compute what one device computes? (law 4)

`record_run` runs the real session, step for step, on every rank and keeps what this rank holds of each gradient,
parameter and buffer; `compare` puts the ranks' parts together and holds them against the plain loop of `reference`.

Of buffers those of floating numbers have to be one device's on every rank: running statistics, the biases of routers,
tables. Two kinds are not, by rule. Where each rank keeps its own by design (`layout.batchnorm=local` and `broadcast`,
buffers that a forward moves where another rank has a filler), the reference that plays the ranks gives its steps no
buffers and tells each rank's beside them. And whole numbers count forwards or samples, which depends on how a step was
cut: they are recorded, and a test that knows the cut says what they have to be.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from allranks.data.micro_step import StepBatch
from allranks.digest import ledger_sum
from allranks.observing.counters import Stopwatch
from allranks.parallel.spread import Spread
from allranks.parameter_map import Box
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.session import Session, assemble
from allranks.stepping.world import Processes
from allranks.verifying.reference import ReferenceStep

RELATIVE = 1e-12
OF_LARGEST = 1e-14

# Below these fractions of its tensor's and of the model's largest gradient an element of it is numerically zero.
ZERO_OF_TENSOR = 1e-6
ZERO_OF_MODEL = 1e-10

Parts = dict[str, tuple[Box, torch.Tensor]]


@dataclass(frozen=True)
class RecordedStep:
    """One step as one rank saw it.

    Attributes:
        loss: the world's loss per target.
        norm: before clipping.
        ledger: the world's, 16 hex digits.
        gradients: this rank's parts, before clipping.
        parameters: this rank's parts, after the update.
        positions: global positions that this rank fed.
        samples: dataset indices at these positions.
        buffers: what this rank holds of them, of every type, after the step.
    """

    loss: float
    norm: float
    ledger: str
    gradients: Parts
    parameters: Parts
    positions: list[int]
    samples: list[int]
    buffers: Parts = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Where a run parts from the reference.

    Attributes:
        step: the step.
        what: "loss", "norm", or "gradient of NAME", "parameter NAME", "buffer NAME".
        error: the largest absolute difference.
        bound: what law 4 allows.
    """

    step: int
    what: str
    error: float
    bound: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} differs by {self.error:.3g}, allowed are {self.bound:.3g}"


class _Recording(Passes):
    """Passes that keep the gradients which the inner ones made."""

    def __init__(self, inner: Passes) -> None:
        self._inner = inner
        self.session: Session | None = None
        self.gradients: Parts = {}

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        assert self.session is not None
        spread, optimizers = self.session.spread, self.session.optimizers
        for sums in self._inner.run(batch, scale):
            # Where the step itself counted its targets, its gradients are not divided yet.
            divide = 1.0 if sums.targets is None else spread.mesh.layout.sample_ranks / max(1.0, float(sums.targets))
            due = {id(parameter) for parameter in optimizers.parameters(sums.which)}
            self.gradients |= {
                name: (spread.map[name].box, _local(tensor.grad) * divide)
                for name, tensor in spread.trainable().items()
                if tensor.grad is not None and id(tensor) in due
            }
            yield sums


def record_run(task: Any, config: Any, processes: Processes, num_steps: int) -> list[RecordedStep]:
    """Run `num_steps` of the real session on this rank; collective."""
    recordings: list[_Recording] = []

    def observe(passes: Passes) -> Passes:
        recordings.append(_Recording(passes))
        return recordings[0]

    session = assemble(task, config, processes, Stopwatch(), lambda: (False, False), observe=observe)
    recordings[0].session = session
    return list(_steps(session, recordings[0], num_steps))


def _steps(session: Session, recording: _Recording, num_steps: int) -> Iterator[RecordedStep]:
    with session.loader() as loader:
        batch: StepBatch | None = next(loader)
        assert batch is not None
        before = session.step.agree_first(batch)
        for _ in range(num_steps):
            assert batch is not None, "the data ended before the steps did"
            recording.gradients = {}
            outcome = session.step.run(batch, before, lambda: next(loader, None))
            session.stream.take(batch)
            values = outcome.values(before, batch.size)
            yield RecordedStep(
                loss=float(values["loss"]),
                norm=float(outcome.grad_norm),
                ledger=str(values["ledger"]),
                gradients=recording.gradients,
                parameters=parts_of(session.spread, "parameter"),
                positions=[int(p) for m in batch.micro_steps for p in m.positions],
                samples=[int(s) for m in batch.micro_steps for s in m.samples],
                buffers=parts_of(session.spread, "buffer"),
            )
            before, batch = outcome.pending, outcome.upcoming


def parts_of(spread: Spread, kind: str) -> Parts:
    """A copy of what this rank holds of every "parameter" or "buffer", each shared one once."""
    return {
        name: (entry.box, spread.local(name).clone())
        for name, entry in spread.map.items()
        if entry.kind == kind and entry.alias_of is None
    }


def fed(ranks: Sequence[Sequence[RecordedStep]], step: int, data_ranks: Sequence[int]) -> dict[int, int]:
    """Position -> sample that the world fed in `step`.

    AssertionError where a position was fed twice, or where the ledger is not that of what was fed.
    """
    pairs = [
        pair for rank in data_ranks for pair in zip(ranks[rank][step].positions, ranks[rank][step].samples, strict=True)
    ]
    found = dict(sorted(pairs))
    assert len(found) == len(pairs), f"step {step}: {len(pairs) - len(found)} positions were fed twice"
    ledger = f"{ledger_sum(list(found), list(found.values())):016x}"
    assert all(steps[step].ledger == ledger for steps in ranks), f"step {step}: the ledger is not that of what was fed"
    return found


def compare(
    ranks: Sequence[Sequence[RecordedStep]], reference: Sequence[ReferenceStep], *, adaptive: bool = False
) -> list[Difference]:
    """Every difference beyond law 4's bounds; empty where the run computed what one device computes.

    Args:
        ranks: each rank's recording.
        reference: the plain loop's steps over the same samples.
        adaptive: the optimizer divides by the size of the gradient (Adam), noise by noise where that is numerically
            zero: parameters are compared only where no gradient has been so yet, and a buffer may be off by as much as
            the other elements are: the bias before a BatchNorm is noise, and the running mean follows it.
    """
    found: list[Difference] = []
    counted: dict[str, torch.Tensor] = {}
    excused = 0.0
    for index, expected in enumerate(reference):
        steps = [steps[index] for steps in ranks]
        largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
        for step in steps:
            found += _number(index, "loss", step.loss, expected.loss) + _number(index, "norm", step.norm, expected.norm)
        gradients, parameters = [s.gradients for s in steps], [s.parameters for s in steps]
        found += _tensors(index, "gradient of", gradients, expected.gradients, OF_LARGEST * largest)
        found += _unexpected(index, gradients, expected.gradients)
        for name, gradient in expected.gradients.items() if adaptive else ():
            counted[name] = counted.get(name, torch.tensor(True)) & _is_significant(gradient, largest)
        found += _tensors(index, "parameter", parameters, expected.parameters, 0.0, counted)
        # A forward comes before its update: what is off now, the next step's buffers have seen.
        found += _tensors(index, "buffer", [s.buffers for s in steps], expected.buffers, excused)
        for name, significant in counted.items():
            excused = max(excused, _error(name, expected.parameters[name], parameters, ~significant))
    return found


def _number(step: int, what: str, value: float, expected: float) -> list[Difference]:
    error, bound = abs(value - expected), RELATIVE * abs(expected)
    return [] if error <= bound else [Difference(step, what, error, bound)]


def _is_significant(gradient: torch.Tensor, largest: float) -> torch.Tensor:
    size = gradient.abs()
    own = float(size.max()) if size.numel() else 0.0
    return size > max(ZERO_OF_TENSOR * own, ZERO_OF_MODEL * largest)


def _tensors(
    step: int,
    what: str,
    ranks: Sequence[Parts],
    expected: Mapping[str, torch.Tensor],
    floor: float,
    counted: Mapping[str, torch.Tensor] | None = None,
) -> list[Difference]:
    found = []
    for name, whole in expected.items():
        bound = max(RELATIVE * float(whole.abs().max()) if whole.numel() else 0.0, floor)
        error = _error(name, whole, ranks, (counted or {}).get(name))
        if not error <= bound:
            found.append(Difference(step, f"{what} {name}", error, bound))
    return found


def _error(name: str, whole: torch.Tensor, ranks: Sequence[Parts], counted: torch.Tensor | None) -> float:
    """The largest difference of any rank's part, where `counted`; infinite where a part is missing or not finite."""
    missing, error = torch.ones_like(whole, dtype=torch.bool), 0.0
    for box, part in (parts[name] for parts in ranks if name in parts):
        place = box.place(tuple(whole.shape))
        missing[place] = False
        difference = (part - whole[place]).abs()
        if counted is not None:
            difference = difference * counted[place]
        if difference.numel():
            largest = float(difference.max())
            error = max(error, largest if math.isfinite(largest) else math.inf)
    return math.inf if bool(missing.any()) else error


def _unexpected(step: int, ranks: Sequence[Parts], expected: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Gradients of parameters that get none on one device."""
    sizes = {
        name: float(part.abs().max()) if part.numel() else 0.0
        for parts in ranks
        for name, (_, part) in parts.items()
        if name not in expected
    }
    return [
        Difference(step, f"gradient of {name}, which has none on one device,", size, 0.0)
        for name, size in sizes.items()
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
