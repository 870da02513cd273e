"""What is found out on a few samples before the first step, and that nothing of it is left behind."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from allranks.data.random_keys import item_key, seed_all
from allranks.errors import DataError, LayoutError, MemoryShortError, TaskError
from allranks.stepping import start_check
from allranks.stepping.loss_check import FEWEST, NUM_SAMPLES
from allranks.stepping.start_check import CHEAP_SECONDS, first_samples
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.stepping.halves import SEARCHED, Half
from tests.training.tasks import Curve, Gan, points

SMALL = ("train.global_batch=6",)


def said(task: Any, layout: str = "single", *overrides: str) -> dict[str, str]:
    """What a session of the task decided, and why."""
    session = session_of(task, config_of(layout, *SMALL, *overrides))
    return {decision.what: decision.because for decision in session.decisions}


class Telling(Curve):
    """Says itself what forward gets and how targets are counted."""

    def inputs(self, batch: Any) -> Any:
        return (batch[0],)

    def targets(self, batch: Any) -> int:
        return len(batch[1])


def test_what_forward_gets_and_how_targets_are_counted() -> None:
    found = said(Curve())
    assert found["forward gets element 0 of the pair that a batch is"] == "Curve has no inputs() of its own"
    assert found["targets are integer labels in element 1, those not -100"] == "Curve has no targets() of its own"
    found = said(Telling())
    assert found["forward gets what inputs() returns"] == found["targets are what targets() returns"]
    assert found["forward gets what inputs() returns"] == "the Task says so"


class Deep(nn.Module):
    """Layers that save what they return; of each forward: how many samples, and how many results live at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(DEPTH))
        self.forwards: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for layer in self.layers:
            x = layer(x).sigmoid()
            results.append(weakref.ref(x.untyped_storage()))
        self.forwards.append((len(x), sum(result() is not None for result in results)))
        return x


class Depth(Curve):
    """Of the deep one, an instance of which has seen no forward yet."""

    def model(self) -> Any:
        return Deep()


DEPTH = 6


def memory_of(layout: str, micro_batch: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Forwards before the first step, and those of two steps."""
    session = session_of(Depth(), config_of(layout, *SMALL, f"train.micro_batch={micro_batch}"))
    seen: Any = session.spread.bare().forwards
    before = list(seen)
    list(step_through(session, 2))
    return before, seen[len(before) :]


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "micro_batch"), [("single", 1), ("single", 2), ("ddp", 1), ("ddp", 2)])
def test_the_start_needs_no_more_memory_than_a_step(layout: str, micro_batch: int, pool: Pools) -> None:
    alone = layout == "single"
    before, trained = memory_of(layout, micro_batch) if alone else pool(2).run(memory_of, layout, micro_batch)[0]
    assert {alive for _, alive in trained} == {DEPTH} and max(rows for rows, _ in trained) == micro_batch
    assert max(rows for rows, _ in before) == {1: FEWEST, 2: NUM_SAMPLES}[micro_batch]
    saving = [rows for rows, alive in before if alive > 1]
    assert saving == ([] if alone else [micro_batch] * 3), "so many at a time, to see which parameters have gradients"


class Differentiating(Curve):
    """Takes the gradient of a function in training mode."""

    def model(self) -> Any:
        return DifferentiatingModel()


class DifferentiatingModel(nn.Module):
    """One layer, beside a derivative of a square."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found + 0.0 * torch.func.grad(lambda value: value.square().sum())(x) if self.training else found


def test_a_function_that_is_differentiated_in_training_mode_is_examined_all_the_same() -> None:
    assert said(Differentiating())["the loss is a sum"].startswith("the parts of a batch add up to the whole")
    assert "not known" not in said(Differentiating())["the loss is a sum"]


class Compiled(Curve):
    """Compiles its model itself, and counts how often."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.graphs: list[Any] = []

    def model(self) -> Any:
        return torch.compile(super().model(), backend=self._note)

    def _note(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


def count_graphs() -> tuple[int, int]:
    """In a worker: of the checks, and of a step."""
    task = Compiled()
    session = session_of(task, config_of("single", *SMALL))
    before = len(task.graphs)
    list(step_through(session, 1))
    torch._dynamo.reset()
    return before, len(task.graphs)


@pytest.mark.distributed
def test_what_the_user_compiles_is_not_compiled_for_the_checks(pool: Pools) -> None:
    ((before, after),) = pool(1).run(count_graphs)
    assert before == 0 < after


class Failing(Curve):
    """Fails in training mode where its draws are fixed, as they are while the loss is examined."""

    def model(self) -> Any:
        return FailingModel()


class FailingModel(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and float(torch.rand(())) == 0.5:
            raise ValueError("not so few samples")
        found: torch.Tensor = self.layer(x)
        return found


def fails(layout: str) -> str:
    """In a worker: what such a failure comes to."""
    try:
        return said(Failing(), layout)["the loss is a sum"]
    except TaskError as error:
        return str(error)


@pytest.mark.distributed
def test_a_failure_in_training_mode_ends_the_start_where_forwards_are_collective(pool: Pools) -> None:
    for found in pool(2).run(fails, "ddp"):
        assert found.endswith("of training mode it is not known, as it fails there (ValueError)")
    for found in pool(2).run(fails, "fsdp"):
        assert "fails on the first samples of its dataset" in found and "not so few samples" in found


class Short(Curve):
    """Its outputs find no memory."""

    def loss(self, output: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 50 GiB\nand more")


def test_memory_that_runs_out_at_the_start_is_no_mistake_of_the_dataset() -> None:
    with pytest.raises(MemoryShortError) as refused:
        said(Short(), "single")
    what = "memory ran out at the start, where the loss of 5 samples is looked at (tried to allocate 50 GiB): use "
    assert str(refused.value).startswith(what) and not refused.value.divisible


class Full(Curve):
    """Its collate finds no memory."""

    def collate(self, samples: Any) -> Any:
        return bytearray(1 << 60)


def test_memory_that_the_dataset_lacks_at_the_start_is_its_own() -> None:
    with pytest.raises(
        TaskError, match=r"^Full fails on the first samples of its dataset:(.|\n)*collate(.|\n)*MemoryError$"
    ):
        said(Full(), "single")


class Sides(IterableDataset[Any]):
    """Shards itself: even ranks see points on the one side, odd ranks on the other."""

    order = "sharded"

    def __iter__(self) -> Iterator[Any]:
        sign = 1 - 2 * (torch.distributed.get_rank() % 2)
        x, y = points(40, seed=1).tensors
        x[:, 0] = x[:, 0].abs() * sign
        return iter(TensorDataset(x, y))


class Sided(Half):
    """What its first samples use depends on the rank; so does, where it is told so, whether its loss couples them."""

    sometimes: bool = True
    coupling: bool = False

    def dataset(self, split: str) -> Any:
        return Sides() if split == "train" else None

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(output, batch)
        return loss * len(batch[1]) if self.coupling and bool((batch[0][:, 0] < 0).all()) else loss


def check_sides(task: Any) -> list[str]:
    """In a worker: what was decided about gradients and the loss, or why it was refused."""
    try:
        session = session_of(task, config_of("ddp", *SMALL))
    except LayoutError as error:
        return [str(error)]
    return [str(d) for d in session.decisions if d.what == SEARCHED or d.what.startswith("the loss")]


@pytest.mark.distributed
def test_ranks_that_see_other_samples_decide_together(pool: Pools) -> None:
    one, other = pool(2).run(check_sides, Sided())
    assert "other.weight, other.bias got none on the first samples" in one[-1]
    assert "a parameter of another process got none on the first samples" in other[-1]
    (one,), (other,) = pool(2).run(check_sides, Sided(coupling=True))
    assert one.startswith("the loss couples the samples of a batch (it does so on another process")
    assert other.startswith("the loss couples the samples of a batch (the parts of a batch do not add up")


def test_several_models_need_a_step() -> None:
    class Several(Curve):
        def model(self) -> Any:
            return {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}

    with pytest.raises(
        TaskError, match=r"returned several modules \(one, two\): Several needs a step\(models, batch\)"
    ):
        said(Several())


def test_a_task_with_a_step_is_not_examined() -> None:
    assert not any(what.startswith(("forward", "targets", "the loss")) for what in said(Gan()))


def test_the_data_of_a_task_with_a_step_begins_anew_too() -> None:
    class FromALine(Gan):
        def dataset(self, split: str) -> Any:
            return Lines(iter(points(40, seed=1))) if split == "train" else None

    with pytest.raises(DataError, match="Lines cannot be read from its beginning again"):
        said(FromALine())


class Noted(torch.utils.data.Dataset[Any]):
    """Notes which samples were loaded, and what a random number was then."""

    def __init__(self, size: int) -> None:
        self.size, self.drawn = size, list[tuple[int, float]]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.drawn.append((index, torch.rand(()).item()))
        return index


def test_the_first_samples_are_loaded_as_in_training() -> None:
    """Each under its own key: whatever was drawn before, they are the same."""
    dataset, again = Noted(9), Noted(9)
    samples, seconds = first_samples(dataset, seed=4)
    assert samples == list(range(NUM_SAMPLES)) and 0 < seconds < 60
    torch.rand(7)
    for index in range(NUM_SAMPLES):
        seed_all(item_key(4, 0, index))
        again[index]
    assert dataset.drawn == again.drawn
    other = Noted(2)
    assert first_samples(other, seed=5)[0] == [0, 1]
    assert other.drawn[0][1] != dataset.drawn[0][1]


def test_without_a_sample_there_is_nothing_to_train_on() -> None:
    with pytest.raises(DataError, match="Noted is empty"):
        first_samples(Noted(0), 0)


class Lines(IterableDataset[int]):
    """0..63 out of `source`, anew each time where that is not given."""

    order = "global"

    def __init__(self, source: Iterator[int] | None = None) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        yield from range(64) if self.source is None else self.source


def test_an_iterable_that_would_lose_its_first_samples_is_refused() -> None:
    with pytest.raises(DataError, match="Lines cannot be read from its beginning again: a second pass over it"):
        first_samples(Lines(iter(range(64))), 0)
    dataset = Lines()
    assert first_samples(dataset, 0)[0] == list(range(NUM_SAMPLES))
    assert list(dataset) == list(range(64))


class FromAGenerator(Curve):
    """Its training data can be read only once, which its author did not think of."""

    def dataset(self, split: str) -> Any:
        return Lines(iter(points(40, seed=1))) if split == "train" else None


def test_a_task_whose_data_can_be_read_once_does_not_start() -> None:
    with pytest.raises(DataError, match="return an object whose __iter__ begins anew"):
        said(FromAGenerator())


def test_the_cost_of_seeding_is_said_where_samples_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    seeding = "three generators are seeded before each sample"
    assert 0 < CHEAP_SECONDS < 1e-3
    monkeypatch.setattr(start_check, "CHEAP_SECONDS", 60.0)
    [(what, because)] = [pair for pair in said(Curve()).items() if pair[0].startswith(seeding)]
    assert "us" in what and "`draws = False`" in because

    class Quiet(Curve):
        def dataset(self, split: str) -> Any:
            dataset = super().dataset(split)
            dataset.draws = False
            return dataset

    assert not any(what.startswith(seeding) for what in said(Quiet()))
    monkeypatch.setattr(start_check, "CHEAP_SECONDS", 0.0)
    assert not any(what.startswith(seeding) for what in said(Curve()))
