"""Forward and backward of a step: what is summed, what is seeded, and what a filler leaves untouched."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.digest import sample_hash
from allranks.parallel.spread import Spread
from allranks.stepping.passes import PlainPasses, buffers_kept, ledger_of
from allranks.stepping.session import Session
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Counted, Tiny, mlp
from tests.stepping.batches import batch_of, micro_step_of


class Given(Tiny):
    """A model and inputs given by the test."""

    _made: nn.Module

    def model(self) -> nn.Module:
        return self._made


def given(made: nn.Module, kind: type[Given] = Given) -> Given:
    task = kind.__new__(kind)
    task._made, task.kind = made, "mlp"
    return task


def session(made: nn.Module, precision: str = "float64", kind: type[Given] = Given) -> Session:
    return session_of(given(made, kind), config_of("single", precision=precision))


def run(found: Session, batch: StepBatch, scale: float | torch.Tensor = 1.0) -> Any:
    (sums,) = PlainPasses(found.forward).run(batch, scale)
    return sums


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for parameter in module.parameters():
        parameter.grad = None
    return [gradient.clone() for gradient in found]


def together(made: nn.Module, samples: list[int]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one plain forward and backward."""
    task = given(made)
    batch = micro_step_of(task, samples).batch
    loss = task.loss(made(batch["x"].double()), batch)
    loss.backward()
    return float(loss.detach()), gradients(made)


def test_micro_steps_add_up_to_one_pass_over_all() -> None:
    made = mlp()
    found = session(made)
    task = given(made)
    batch = batch_of(micro_step_of(task, [1, 2, 3]), micro_step_of(task, [4], 3), micro_step_of(task, [5, 6], 4))
    sums = run(found, batch, 0.5)
    ours = gradients(made)
    loss, expected = together(made, [1, 2, 3, 4, 5, 6])
    assert (sums.which, sums.targets, sums.loss.dtype) == ("", None, torch.float64)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-14)
    for gradient, other in zip(ours, expected, strict=True):
        assert torch.allclose(gradient, 0.5 * other, rtol=1e-12, atol=1e-15)


def test_the_last_micro_step_is_the_one_that_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    found, task = session(mlp()), given(mlp())
    flags: list[bool] = []
    monkeypatch.setattr(Spread, "synchronise", lambda self, last: flags.append(last))
    run(found, batch_of(*(micro_step_of(task, [sample]) for sample in (1, 2, 3))))
    assert flags == [False, False, True]


def test_the_scale_may_wait_on_the_device() -> None:
    made = mlp()
    found, batch = session(made), batch_of(micro_step_of(given(made), [1, 2]))
    run(found, batch, 0.25)
    first = gradients(made)
    run(found, batch, torch.tensor(0.25, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(made), strict=True))


def test_a_filler_counts_for_nothing() -> None:
    made = Counted()
    found, task = session(made), given(made)
    real, filler = micro_step_of(task, [1, 2]), micro_step_of(task, [7], weight=0)
    sums = run(found, batch_of(real, filler))
    loss, expected = sums.loss.item(), gradients(made)
    assert (made.calls.item(), made.seen.tolist()) == (1, [2, 2])
    alone = run(found, batch_of(real))
    assert (loss, sums.ledger) == (alone.loss.item(), alone.ledger)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(made), strict=True))
    nothing = run(found, batch_of(filler))
    assert (nothing.loss.item(), nothing.ledger) == (0.0, 0)
    # Its backward ran: every rank takes part in every collective.
    assert [float(gradient.abs().sum()) for gradient in gradients(made)] == [0.0] * len(expected)
    assert made.calls.item() == 2


def test_the_ledger_is_of_what_was_fed() -> None:
    task = given(mlp())
    batch = batch_of(micro_step_of(task, [9, 4], 10), micro_step_of(task, [7], 12), micro_step_of(task, [7], weight=0))
    expected = sample_hash(10, 9) + sample_hash(11, 4) + sample_hash(12, 7)
    assert ledger_of(batch) == expected % 2**64
    assert ledger_of(batch_of(micro_step_of(task, list(range(40)), 5))) == sum(
        sample_hash(5 + sample, sample) for sample in range(40)
    ) % (2**64)


def test_each_micro_step_draws_its_own_numbers_and_the_same_again() -> None:
    made = nn.Sequential(nn.Dropout(0.5), mlp())
    found, task = session(made), given(made)

    def loss(*keys: int) -> float:
        torch.manual_seed(len(keys))  # the global state is not what is drawn from
        value = float(run(found, batch_of(*(micro_step_of(task, [1, 2, 3], key=key) for key in keys))).loss)
        gradients(made)
        return value

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    assert loss(1, 2) == pytest.approx(loss(1) + loss(2), rel=1e-14)


class Codebook(nn.Module):
    """Its backward needs the buffer that its forward changes without autograd's knowing, as vector quantisers do."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("codes", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        output = found * self.codes
        if self.training:
            self.codes.data.mul_(2.0)
        return output


def test_buffers_are_put_back_behind_autograds_back() -> None:
    made = Codebook()
    found, task = session(made), given(made)
    made.codes.data.fill_(1.0)
    run(found, batch_of(micro_step_of(task, [3], weight=0)))
    assert made.codes.tolist() == [1.0] * 3
    run(found, batch_of(micro_step_of(task, [3])))
    assert made.codes.tolist() == [2.0] * 3


def test_buffers_are_kept_unless_told_otherwise() -> None:
    made = Counted()
    found = session(made)
    for unless, expected in ((False, 0), (True, 1)):
        with buffers_kept(found.spread, unless=unless):
            made(torch.ones(4, 5, dtype=torch.float64))
        assert (made.calls.item(), made.seen.tolist()) == (expected, [4 * expected] * 2)


class Growing(nn.Module):
    """Two tables that a longer input replaces, of which the checkpoint holds one, and a buffer that is made anew."""

    table: torch.Tensor
    held: torch.Tensor
    made: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.length = mlp(), 2
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("held", torch.zeros(2))
        self.register_buffer("made", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made = self.made + 1
        self.held.add_(1)
        if len(x) > self.length:
            self.length = len(x)
            self.table, self.held = torch.zeros(self.length), torch.ones(self.length)
        found: torch.Tensor = self.inner(x) + self.table[: len(x), None] + self.made.sum()
        return found


def test_a_buffer_that_another_replaces_is_put_back() -> None:
    made = Growing()
    found = session(made)
    made.length, made.table = 2, torch.zeros(2, dtype=torch.float64)
    before = made.held.clone(), made.made.clone()
    objects = made.held, made.made
    with buffers_kept(found.spread, unless=False):
        output = made(torch.ones(4, 5, dtype=torch.float64, requires_grad=True))
    assert made.held is objects[0] and made.made is objects[1]
    assert torch.equal(made.held, before[0]) and torch.equal(made.made, before[1])
    assert made.length == len(made.table) == 2, "and what tells of it"
    output.sum().backward()
    run(found, batch_of(micro_step_of(given(made), [3, 4, 5, 6, 7], weight=0)))
    assert made.made is objects[1] and torch.equal(made.made, before[1])


class Frequencies(nn.Module):
    """A table of one shape that a longer input rescales, as dynamic rotary embeddings do; no checkpoint holds it."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cached = mlp(), 4
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = len(x)
        if len(x) > self.cached:
            self.table, self.cached, self.longest = torch.ones_like(self.table) / len(x), len(x), x
        found: torch.Tensor = self.inner(x) * self.table
        return found


def test_a_table_goes_back_with_the_attribute_that_tells_its_length() -> None:
    made = Frequencies()
    found, plain = session(made), Frequencies().double()
    x = torch.ones(8, 5, dtype=torch.float64)
    with buffers_kept(found.spread, unless=False):
        made(x)
    assert made.table.tolist() == [1.0] * 3 and made.cached == 4 and not hasattr(made, "longest")
    made(x), plain(x)
    assert torch.equal(made.table, plain.table) and made.cached == plain.cached == 8
    with buffers_kept(found.spread, unless=False):
        made(x[:2])
    assert made.kept == 2, "where no table is replaced attributes are the forward's own affair"


def test_a_table_of_another_shape_stays_where_somebody_else_knows_its_length() -> None:
    made = Growing()
    found = session(made)
    made.table = torch.zeros(2, dtype=torch.float64)
    with buffers_kept(found.spread, unless=False):
        made.table = torch.zeros(4, dtype=torch.float64)
    assert len(made.table) == 4


class Named(nn.Module):
    """Takes its input by a name, and gives a dict back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, *, points: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(points)}


class NamedTask(Given):
    def inputs(self, batch: Any) -> Any:
        return {"points": batch["x"]}

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        assert output["logits"].dtype is not torch.bfloat16
        return super().loss(output["logits"], batch)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_inputs_by_name_and_outputs_of_any_shape(precision: str) -> None:
    made = Named()
    found = session(made, precision, NamedTask)
    sums = run(found, batch_of(micro_step_of(given(made), [1, 2])))
    assert sums.loss.item() > 0


def test_inputs_are_cast_where_the_precision_is_float64() -> None:
    found = session(mlp())
    micro_step: MicroStep = micro_step_of(given(mlp()), [1])
    placed: Any = found.forward.place(micro_step.batch)
    assert placed["x"].dtype is torch.float64
    assert placed["y"].dtype is torch.int64
