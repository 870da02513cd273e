"""The passes of a run, watched: what they leave in the gradients is copied before anybody clips it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final
from unittest.mock import patch

from torch.distributed.tensor import DTensor

from allranks import fault_points
from allranks.data.evaluation import evaluation_batches
from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import last_key, mix
from allranks.digest import sample_hash
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.scaler import Scaler
from allranks.stepping.session import Session
from allranks.training import validate as validating
from allranks.verifying.observation import values_of
from allranks.verifying.recording import Part, Parts, StepRecord

MOST_TURNS: Final = 64
"""Losses that a Task's own step yields, whose samples are known."""


@final
class WatchedPasses(Passes):
    """The run's own passes, and the step that they are recorded in."""

    def __init__(self, inner: Passes) -> None:
        self.inner = inner
        self.session: Session | None = None
        self.step = StepRecord()

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        assert self.session is not None
        for sums in self.inner.run(batch, scale):
            self.step.raw |= gradients_of(self.session, sums)
            self.step.updates += 1
            yield sums


def rows_of_step(batch: StepBatch) -> list[int]:
    """Digests of the samples that count."""
    return [row for micro_step in batch.micro_steps for row in rows_of_forward(micro_step)]


def values_of_step(batch: StepBatch) -> dict[int, tuple[int, int]]:
    """(digest of its shapes, of its values) of each sample that counts, by its row."""
    found = dict[int, tuple[int, int]]()
    for micro_step in batch.micro_steps:
        rows, values = rows_of_forward(micro_step), values_of(micro_step.batch)
        found |= dict(zip(rows, values, strict=True)) if len(rows) == len(values) else {}
    return found


def rows_in_work(batch: StepBatch, *, turns: bool = False) -> Callable[[], list[int]]:
    """Gives those of the micro-step whose forward runs, by the numbers with which it was seeded; [] of none of them.

    Args:
        turns: whether it is seeded for each loss that a Task's own step yields.
    """
    found = dict[int, list[int]]()
    for micro_step in batch.micro_steps:
        key, rows = micro_step.random_key, rows_of_forward(micro_step)
        found |= {mix(key, turn): rows for turn in range(MOST_TURNS)} if turns else {key: rows}
    return lambda: found.get(last_key(), [])


def rows_of_forward(micro_step: MicroStep) -> list[int]:
    """Digests of its samples that count, in their order."""
    return [sample_hash(int(p), int(s)) for p, s in zip(micro_step.positions, micro_step.samples, strict=True)]


@contextmanager
def forwards_told(begin: Callable[[], None]) -> Iterator[None]:
    """Inside, it is called before every forward of a micro-step, one whose gradients are discarded, too."""
    reach = fault_points.reach

    def reached(point: str) -> None:
        reach(point)
        if point == "forward":
            begin()

    with patch.object(fault_points, "reach", reached):
        yield


@contextmanager
def evaluation_told(begin: Callable[[list[int]], None]) -> Iterator[None]:
    """Inside, it is called before every forward of an evaluation, with digests of its samples."""
    made = evaluation_batches

    def batches(*arguments: Any, **options: Any) -> Iterator[MicroStep]:
        for micro_step in made(*arguments, **options):
            begin(rows_of_forward(micro_step))
            yield micro_step

    with patch.object(validating, "evaluation_batches", batches):
        yield


def gradients_of(session: Session, sums: StepSums) -> Parts:
    """This rank's parts of the gradients that an optimizer is about to get, before clipping."""
    spread = session.spread
    # Where the step itself counted its targets, its gradients are not divided yet.
    divide = 1.0 if sums.targets is None else spread.mesh.layout.sample_ranks / max(1.0, float(sums.targets))
    scaler = scaler_of(session)
    if scaler is not None:
        divide = spread.mesh.layout.sample_ranks / float(scaler.scale)
    due = {id(parameter) for parameter in session.optimizers.parameters(sums.which)}
    found = {}
    for name, tensor in spread.trainable().items():
        if tensor.grad is not None and id(tensor) in due:
            local = tensor.grad._local_tensor if isinstance(tensor.grad, DTensor) else tensor.grad
            found[name] = Part(spread.map[name].box, local.detach().cpu() * divide)
    return found


def scaler_of(session: Session) -> Scaler | None:
    """What scales the losses under float16; None where nothing does."""
    return next((other for other in session.beside if isinstance(other, Scaler)), None)
