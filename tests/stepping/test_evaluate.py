"""Exact evaluation: every sample once, in evaluation mode, leaving nothing behind."""

import math
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from allranks.data.evaluation import evaluation_batches
from allranks.errors import TaskError
from allranks.stepping.evaluate import evaluate, world_means
from allranks.stepping.session import Session
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, session_of
from tests.distributed.tasks import IGNORED, MODELS, NUM_SAMPLES, Tiny


def measure(session: Session, batch_size: int = 12, micro_batch: int | None = None) -> dict[str, float]:
    batches = evaluation_batches(
        session.task.dataset("validation"),
        batch_size=batch_size,
        num_ranks=session.processes.mesh.dp,
        dp_rank=session.processes.mesh.dp_rank,
        micro_batch=micro_batch,
        count_targets=session.count_targets,
        draws=False,  # else the last item's key decides what the forward draws
    )
    return evaluate(session.forward, batches, session.processes.data_group)


def expected() -> dict[str, float]:
    """In one pass over the whole split, on one device."""
    task = Tiny()
    batch = task.collate([task.dataset("validation")[index] for index in range(NUM_SAMPLES)])
    with torch.no_grad():
        output = initial_model(task).double()(batch["x"].double())
    targets = int((batch["y"] != IGNORED).sum())
    right = int((output.argmax(-1) == batch["y"])[batch["y"] != IGNORED].sum())
    return {"loss": float(task.loss(output, batch)) / targets, "accuracy": right / targets}


def measure_here(layout: str, batch_size: int, micro_batch: int | None) -> tuple[dict[str, float], bool]:
    session = session_of(Tiny(), config_of(layout))
    found = measure(session, batch_size, micro_batch)
    module = session.spread.bare()
    cut = all(isinstance(p, DTensor) for p in module.parameters())
    return found, cut


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "world_size", "batch_size", "micro_batch"),
    [
        ("single", 1, 61, None),
        ("ddp", 2, 12, None),
        ("ddp", 4, 7, 1),  # the last batch has 5 samples: a rank runs a filler
        ("fsdp", 3, 20, 3),
        ("fsdp,sharding=grad_op", 2, 60, None),  # the last batch has 1
    ],
)
def test_exact_and_resharded(
    pool: Pools, layout: str, world_size: int, batch_size: int, micro_batch: int | None
) -> None:
    for found, cut in pool(world_size).run(measure_here, layout, batch_size, micro_batch):
        assert found == pytest.approx(expected(), rel=1e-13)
        assert found["accuracy"] == expected()["accuracy"]
        assert cut == layout.startswith("fsdp")


class Noisy(nn.Module):
    """Draws numbers in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["mlp"]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x + 0.1 * torch.randn_like(x))
        return found


class Given(Tiny):
    """A model and metrics given by the test."""

    _made: nn.Module = MODELS["mlp"]()
    _metric: Any = None

    def model(self) -> nn.Module:
        return self._made

    def metrics(self, output: Any, batch: Any) -> Any:
        return self._metric(output, batch)


def given(made: nn.Module, metric: Any = lambda output, batch: {}) -> Given:
    task = Given.__new__(Given)
    task._made, task._metric, task.kind = made, metric, "mlp"
    return task


def test_each_module_gets_its_own_mode_back() -> None:
    """A part that the user froze in evaluation mode stays frozen."""
    made = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3), nn.Dropout(0.5))
    made[1].eval()
    session = session_of(given(made), config_of("single"))
    first = measure(session)
    assert [part.training for part in made.modules()] == [True, True, False, True, True]
    assert measure(session) == first


def test_an_error_does_not_leave_evaluation_mode_behind() -> None:
    def fail(output: Any, batch: Any) -> Any:
        assert not made.training
        raise ZeroDivisionError

    made = MODELS["mlp"]()
    with pytest.raises(ZeroDivisionError):
        measure(session_of(given(made, fail), config_of("single")))
    assert made.training


def test_random_models_see_the_same_numbers_in_every_evaluation() -> None:
    session = session_of(given(Noisy()), config_of("single"))
    first = measure(session)
    torch.manual_seed(123)
    assert measure(session) == first
    assert math.isfinite(first["loss"])


def test_no_gradient_is_recorded() -> None:
    def look(output: Any, batch: Any) -> Any:
        return {"recorded": (float(output.requires_grad), 1)}

    assert measure(session_of(given(MODELS["mlp"](), look), config_of("single")))["recorded"] == 0.0


def test_metrics_may_be_tensors_arrays_or_numbers() -> None:
    def metric(output: Any, batch: Any) -> Any:
        size = len(output)
        return {"a": (torch.tensor(float(size)), size), "b": (numpy.float32(size), numpy.int64(2 * size)), "c": (0, 0)}

    found = measure(session_of(given(MODELS["mlp"](), metric), config_of("single")))
    assert (found["a"], found["b"]) == (1.0, 0.5)
    assert math.isnan(found["c"])


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (3.0, r"metrics\(\) returned 3.0: return {name: \(sum, count\)}"),
        ({"a": 3.0}, r"metrics\(\) returned {'a': 3.0}"),
        ({"a": (torch.ones(2), 2)}, r"metrics\(\): a has tensor\(\[1., 1.\]\) where a number is due"),
        ({"a": ("x", 2)}, r"metrics\(\): a has 'x' where a number is due"),
        ({"a": (1, 2), "loss": (1, 2)}, r"Given.metrics\(\) names one of its metrics 'loss', .*: give it another name"),
    ],
)
def test_metrics_that_break_the_contract_are_refused(metric: Any, message: str) -> None:
    session = session_of(given(MODELS["mlp"](), lambda output, batch: metric), config_of("single"))
    with pytest.raises(TaskError, match=message):
        measure(session)


def nan_in_fillers() -> dict[str, float]:
    """The metric of a filler is not even 0 * nan."""
    made = MODELS["mlp"]()
    session = session_of(given(made), config_of("ddp"))
    micro_steps = list(
        evaluation_batches(
            session.task.dataset("validation"), batch_size=60, num_ranks=2, dp_rank=session.stream.dp_rank
        )
    )
    weights = iter([micro_step.weight for micro_step in micro_steps])

    def metric(output: Any, batch: Any) -> Any:
        return {"nan": (1.0 if next(weights) else math.nan, 1)}

    session.task._metric = metric  # type: ignore[attr-defined]
    assert [micro_step.weight for micro_step in micro_steps] == ([1, 1] if session.stream.dp_rank == 0 else [1, 0])
    return evaluate(session.forward, micro_steps, session.processes.data_group)


@pytest.mark.distributed
def test_fillers_add_nothing(pool: Pools) -> None:
    assert [found["nan"] for found in pool(2).run(nan_in_fillers)] == [1.0, 1.0]


class PerClass(Tiny):
    """Its metrics' names depend on the batch: those of the classes in it, one for a single sample of the split."""

    def metrics(self, output: Any, batch: Any) -> Any:
        found: dict[Any, tuple[Any, Any]] = {}
        for label in batch["y"].unique().tolist():
            of_label = batch["y"] == label
            found[label] = ((output.argmax(-1) == batch["y"])[of_label].sum(), of_label.sum())
            found[f"of {label}"] = (output[of_label].sum(), 10.0**label * int(of_label.sum()))
        return found | {f"sample {label}": (label, 1) for label in batch["y"].tolist() if len(batch["y"]) == 1}


def per_class(layout: str, micro_batch: int | None) -> dict[str, float]:
    return measure(session_of(PerClass(), config_of(layout)), 60, micro_batch)


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "world_size", "micro_batch"), [("ddp", 2, 1), ("fsdp", 2, 2), ("ddp", 3, 1)])
def test_names_may_depend_on_the_batch(pool: Pools, layout: str, world_size: int, micro_batch: int) -> None:
    """The 61st sample has a batch of its own, in which other ranks run fillers."""
    [alone] = pool(1).run(per_class, "single", micro_batch)
    assert {"-100", "0", "1", "2", "of 0", "of 1", "of 2", "loss"} < set(alone)
    assert len({round(value, 9) for value in alone.values()}) > 5
    for found in pool(world_size).run(per_class, layout, micro_batch):
        assert list(found) == sorted(found)
        shared = {name: value for name, value in found.items() if not name.startswith("sample")}
        assert shared == pytest.approx({n: v for n, v in alone.items() if not n.startswith("sample")}, rel=1e-12)


def of_each_rank() -> dict[str, float]:
    """Three ranks, of which one has no name at all, and one has a long one."""
    rank = torch.distributed.get_rank()
    sums: list[dict[str, Any]] = [{"b": (1.0, 2.0)}, {}, {"a": (3, 0), "b": (2.0, 4.0), "\u00e9" * 99: (6.0, 3.0)}]
    return world_means(sums[rank], torch.distributed.group.WORLD, torch.device("cpu"))


def no_names() -> dict[str, float]:
    return world_means({}, torch.distributed.group.WORLD, torch.device("cpu"))


@pytest.mark.distributed
def test_every_rank_gets_the_names_of_all(pool: Pools) -> None:
    for found in pool(3).run(of_each_rank):
        assert list(found) == ["a", "b", "\u00e9" * 99]
        assert math.isnan(found["a"]) and (found["b"], found["\u00e9" * 99]) == (0.5, 2.0)
    assert pool(2).run(no_names) == [{}, {}]
    assert world_means({}, None, torch.device("cpu")) == {}
