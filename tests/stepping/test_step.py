"""Run, agree, clip, update: in that order, with the numbers that were agreed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from allranks.data.micro_step import StepBatch
from allranks.errors import TaskError
from allranks.observing.counters import Stopwatch
from allranks.stepping.agreement import Agreement, Ballot
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.schedule import Schedule
from allranks.stepping.session import Session
from allranks.stepping.step import Step
from tests.distributed.sessions import SGD, config_of, session_of
from tests.distributed.tasks import Tiny
from tests.stepping.batches import batch_of, micro_step_of

LR = 0.1


def session(*overrides: str) -> Session:
    return session_of(Tiny(), config_of("single", *SGD[:2], "optimizer.weight_decay=0", *overrides))


class Scripted(Passes):
    """Yields these rounds, each after setting every gradient to a value; notes what happens when."""

    def __init__(self, found: Session, rounds: list[tuple[float, float | None]], notes: list[str]) -> None:
        self.found, self.rounds, self.notes = found, rounds, notes
        self.scale: Scale | None = None

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        self.scale = scale
        for gradient, targets in self.rounds:
            self.notes.append("run")
            for parameter in self.found.spread.trainable().values():
                parameter.grad = torch.full_like(parameter, gradient)
            counted = None if targets is None else torch.tensor(targets, dtype=torch.float64)
            yield StepSums("", torch.tensor(2.5, dtype=torch.float64), counted, 77)


def step(
    found: Session, rounds: list[tuple[float, float | None]], max_norm: float | None = None, stop: Any = (False, False)
) -> tuple[Step, Scripted, list[str]]:
    notes: list[str] = []
    passes = Scripted(found, rounds, notes)

    class Noting(Agreement):
        def start(self, ballot: Ballot) -> Any:
            notes.append("agree")
            return super().start(ballot)

    made = Step(
        found.spread,
        passes,
        found.optimizers,
        Schedule("linear", 0, 100, 0.0),
        Noting(None, torch.device("cpu")),
        max_norm=max_norm,
        stop_requested=lambda: stop,
        stopwatch=Stopwatch(),
    )
    return made, passes, notes


def before(found: Session, targets: int) -> Any:
    agreement = Agreement(None, torch.device("cpu"))
    return agreement.start(Ballot(torch.zeros(()), targets, 0, False, False, 0))


def weights(found: Session) -> torch.Tensor:
    return torch.cat([found.spread.local(name).flatten() for name in found.spread.trainable()]).clone()


def any_batch() -> StepBatch:
    return batch_of(micro_step_of(Tiny(), [1, 2]))


def test_the_order_and_the_outcome() -> None:
    found = session()
    made, passes, notes = step(found, [(1.0, None)], stop=(True, False))
    old, coming = weights(found), batch_of(micro_step_of(Tiny(), [3, 4, 5]))

    def upcoming() -> StepBatch:
        notes.append("load")
        assert torch.equal(weights(found), old), "loading comes before the update"
        return coming

    outcome = made.run(any_batch(), before(found, 4), upcoming)
    assert notes == ["run", "load", "agree"]
    assert passes.scale == 1 / 4
    agreed = outcome.pending.read()
    assert (agreed.loss, agreed.ledger, agreed.next_samples, agreed.next_targets) == (2.5, 77, 3, 0)
    assert (agreed.interrupt, agreed.terminate) == (True, False)
    assert outcome.upcoming is coming and outcome.targets is None
    assert outcome.lr == LR
    assert outcome.grad_norm == pytest.approx(len(old) ** 0.5)
    assert torch.allclose(weights(found), old - LR)
    assert all(parameter.grad is None for parameter in found.spread.trainable().values())


def test_clipping_comes_before_the_update_and_the_norm_is_that_before() -> None:
    found = session()
    made, _, _ = step(found, [(1.0, None)], max_norm=1.0)
    old = weights(found)
    outcome = made.run(any_batch(), before(found, 4), lambda: None)
    assert outcome.grad_norm == pytest.approx(len(old) ** 0.5)
    assert float((weights(found) - old).norm()) == pytest.approx(LR, rel=1e-6)
    assert outcome.upcoming is None


def test_targets_counted_in_the_step_divide_before_clipping() -> None:
    found = session()
    made, _, notes = step(found, [(8.0, 4.0), (3.0, 2.0)])
    old = weights(found)
    outcome = made.run(any_batch(), before(found, 1), lambda: None)
    assert notes == ["run", "agree", "run"], "one agreement a step, whatever the number of rounds"
    assert torch.allclose(weights(found), old - LR * (8 / 4 + 3 / 2))
    assert outcome.targets is not None and outcome.targets.item() == 4.0
    assert outcome.grad_norm == pytest.approx(1.5 * len(old) ** 0.5)


def test_a_step_without_targets_divides_by_one() -> None:
    found = session()
    made, passes, _ = step(found, [(0.0, 0.0)])
    made.run(any_batch(), before(found, 0), lambda: None)
    assert passes.scale == 1.0
    assert torch.isfinite(weights(found)).all()


def test_the_schedule_is_asked_by_samples() -> None:
    found = session()
    made, _, _ = step(found, [(1.0, None)])
    batch = StepBatch(9, 50, 2, any_batch().micro_steps)
    assert made.run(batch, before(found, 1), lambda: None).lr == pytest.approx(LR / 2)


def test_a_step_that_yields_nothing_is_refused() -> None:
    found = session()
    made, _, _ = step(found, [])
    with pytest.raises(TaskError, match="ended without yielding"):
        made.run(any_batch(), before(found, 1), lambda: None)


def test_the_first_agreement_carries_the_first_targets() -> None:
    found = session()
    with found.loader() as loader:
        batch = next(loader)
    agreed = found.step.agree_first(batch).read()
    assert agreed.next_targets == batch.targets
    assert (agreed.next_samples, agreed.loss, agreed.ledger) == (len(batch.micro_steps[0].positions), 0.0, 0)
