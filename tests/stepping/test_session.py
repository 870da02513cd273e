"""One training, assembled: what is checked, what is decided, and what the laws fix."""

import importlib
import os
from typing import Any

import pytest
import torch
from torch import nn

from allranks.config import resolve_config
from allranks.data.cut import Cut, cut_step
from allranks.data.stream import DataStream, draws
from allranks.errors import AllranksError, ConfigError, DataError, LayoutError, TaskError
from allranks.observing.counters import Stopwatch
from allranks.stepping.schedule import Schedule
from allranks.stepping.session import assemble, be_deterministic, make_schedule
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, processes_of, session_of, step_through
from tests.training.tasks import Broken, Counted, Curve, Gan, Normed, OwnOptimizer, Streamed

SMALL = ("train.global_batch=6",)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ("empty", DataError, "TensorDataset is empty"),
        ("empty iterable", DataError, "Counted is empty"),
        ("small", DataError, r"TensorDataset has 3 samples, fewer than train.global_batch\(6\)"),
        ("undeclared", DataError, "declares order='some'"),
        ("nothing", DataError, r"dataset\(\"train\"\) returned None"),
        ("mean", TaskError, "Broken.loss returns a mean over targets .* reduction='sum'"),
        ("vector", TaskError, r"Broken.loss returned a float64 tensor \[3\]: return one floating-point number"),
        ("detached", TaskError, "without a gradient: is something detached"),
        ("number", TaskError, "return a tensor"),
        ("nan", TaskError, "is nan before the first step"),
    ],
)
def test_bad_input_is_one_clear_line(wrong: str, error: type[AllranksError], words: str) -> None:
    with pytest.raises(error, match=words) as refused:
        session_of(Broken(wrong=wrong), config_of("single", *SMALL))
    assert "\n" not in str(refused.value)


def test_an_error_of_the_users_own_shows_their_line() -> None:
    with pytest.raises(TaskError, match="fails on the first samples") as refused:
        session_of(Broken(wrong="raises"), config_of("single", *SMALL))
    assert 'raise ZeroDivisionError("the user\'s own mistake")' in str(refused.value)


def test_what_a_session_is_made_of() -> None:
    session = session_of(Curve(), config_of("single", *SMALL))
    assert isinstance(session.validation, torch.utils.data.Dataset) and session.count_targets is not None
    assert session.schedule == Schedule("constant", 0, 18, 0.0)
    said = [str(decision) for decision in session.decisions]
    assert any(line.startswith("forward gets element 0 of the pair") for line in said)
    assert any(line.startswith("the loss is a sum, because the parts") for line in said)
    assert not any("loads instead" in line for line in said)
    with session.loader() as loader:
        batch = next(loader)
    assert (batch.step, batch.size, batch.targets) == (0, 6, 6)


def test_the_loader_says_what_it_decided() -> None:
    said = [str(d) for d in session_of(Streamed(), config_of("single", *SMALL, "data.workers=3")).decisions]
    assert "1 process loads instead of data.workers(3), because each would read all of an iterable dataset" in said


def test_a_task_with_a_step_has_neither_targets_nor_validation() -> None:
    session = session_of(Gan(), config_of("single", *SMALL))
    assert session.validation is None and session.count_targets is None
    said = "nothing is evaluated while it trains, and metrics() is not called, because Gan has a step() of its own"
    assert said in map(str, session.decisions)
    assert set(session.optimizers.by_name) == set(session.spread.modules) == {"maker", "critic"}


def test_the_tasks_own_optimizer_is_taken_and_what_it_leaves_without_effect_is_said() -> None:
    session = session_of(OwnOptimizer(), config_of("single", *SMALL, "optimizer.lr=0.5", "optimizer.weight_decay=0.1"))
    assert isinstance(session.optimizers.by_name[""], torch.optim.SGD)
    because = "because OwnOptimizer.optimizer() makes the optimizer"
    assert f"optimizer.lr, optimizer.weight_decay has no effect, {because}" in map(str, session.decisions)
    assert "optimizer()" not in "".join(map(str, session_of(Curve(), config_of("single", *SMALL)).decisions))


def test_initial_values_are_the_models_own_under_the_seed() -> None:
    for seed in (0, 3):
        session = session_of(Curve(), config_of("single", *SMALL, f"train.seed={seed}"))
        expected = initial_model(Curve(), seed).double().state_dict()
        assert all(torch.equal(session.spread.local(name), value) for name, value in expected.items())
    torch.manual_seed(3)
    by_hand = Curve().model().double().state_dict()
    assert all(torch.equal(session.spread.local(name), value) for name, value in by_hand.items())


def test_a_kept_schedule_is_taken() -> None:
    config, kept = config_of("single", *SMALL, "schedule.name=linear"), Schedule("cosine", 6, 60, 0.1)
    processes = processes_of(config)
    session = assemble(Curve(), config, processes, Stopwatch(), lambda: (False, False), kept_schedule=kept)
    assert session.schedule is kept


def test_deterministic_kernels_are_asked_for() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        session_of(Curve(), config_of("single", *SMALL, "train.deterministic=true"))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_deterministic_matrix_products_on_cuda_need_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        be_deterministic(torch.device("cuda"))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's own stays"
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        be_deterministic(torch.device("cpu"))
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        be_deterministic(torch.device("cuda"))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(before)


def test_stop_requests_are_asked_for_at_every_agreement() -> None:
    config, asked = config_of("single", *SMALL), iter([(False, False), (False, True), (True, False)])
    session = assemble(Curve(), config, processes_of(config), Stopwatch(), lambda: next(asked))
    with session.loader() as loader:
        batch = next(loader)
        first = session.step.agree_first(batch)
        second = session.step.run(batch, first, lambda: next(loader, None)).pending.read()
    assert [(one.interrupt, one.terminate) for one in (first.read(), second)] == [(False, False), (False, True)]


def cut(*overrides: str, fixed: bool) -> Cut:
    config = config_of("single", "train.global_batch=12", *overrides)
    return cut_step(config.train, processes_of(config).mesh.layout, fixed=fixed)


def test_how_a_step_is_cut() -> None:
    assert cut(fixed=False) == Cut(12, 1)
    assert cut("train.micro_batch=5", fixed=False) == Cut(12, 1, 5)
    assert cut("train.micro_steps=3", fixed=False) == Cut(12, 1, None, 3)
    assert cut(fixed=True) == Cut(12, 1, None, 1)
    assert cut("train.micro_steps=3", fixed=True) == Cut(12, 1, None, 3)
    with pytest.raises(ConfigError, match=r"micro_steps=3 and train\.micro_batch=5 both say how a step is cut"):
        cut("train.micro_steps=3", "train.micro_batch=5", fixed=False)
    with pytest.raises(ConfigError, match=r"train\.micro_batch=5.*set train\.micro_steps"):
        cut("train.micro_batch=5", fixed=True)


class Contrastive(Curve):
    """Says that its loss couples samples."""

    coupled = True


class Centring(nn.Module):
    """Takes the mean of its batch away while it trains, and keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x - x.mean(0) if self.training else x)
        return found


class Centred(Curve):
    """Couples its samples in training mode alone."""

    def model(self) -> Any:
        return Centring()


@pytest.mark.parametrize("task", [Normed, Contrastive, Centred])
def test_batch_statistics_and_coupled_losses_fix_the_number_of_forwards(task: Any) -> None:
    cut = session_of(task(), config_of("single", *SMALL)).stream.cut
    assert cut == Cut(6, 1, None, 1, least=2 if task is Normed else 1)
    with pytest.raises(ConfigError, match="micro_steps"):
        session_of(task(), config_of("single", *SMALL, "train.micro_batch=2"))


def refused(task: Any, layout: str = "ddp") -> str:
    with pytest.raises(LayoutError) as error:
        session_of(task, config_of(layout, *SMALL))
    return str(error.value)


@pytest.mark.distributed
def test_a_coupled_loss_over_several_ranks_is_refused(pool: Pools) -> None:
    for message in pool(2).run(refused, Contrastive()):
        assert (
            "couples the samples of a batch (Contrastive says so (coupled = True)), and each of 2 data-parallel ranks"
            in message
        )
    for layout in ("ddp", "fsdp"):
        for message in pool(2).run(refused, Centred(), layout):
            assert message.startswith("the loss couples the samples of a batch (in training mode the parts of a batch")
            assert "and each of 2 data-parallel ranks would couple its own only" in message


def schedule(dataset: Any, *overrides: str, **length: int) -> Schedule:
    names = [f"train.{name}={value}" for name, value in length.items()]
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.global_batch=5", *names, *overrides])
    stream = DataStream(dataset, cut=Cut(5), epochs=config.train.epochs, steps=config.train.steps)
    return make_schedule(config, stream)


def test_where_a_schedule_ends() -> None:
    """In samples; where the steps are not given, the data says how many there are: 13 samples are 3 steps an epoch."""
    linear = "schedule.name=linear"
    assert schedule(range(13), linear, "schedule.warmup=2", steps=9) == Schedule("linear", 10, 45, 0.0)
    assert schedule(range(13), linear, "schedule.steps=7", steps=9) == Schedule("linear", 0, 35, 0.0)
    assert schedule(range(13), linear, "schedule.floor=0.5", epochs=1) == Schedule("linear", 0, 15, 0.5)
    assert schedule(range(13), linear, epochs=2) == Schedule("linear", 0, 30, 0.0)
    endless = Counted("global", 13)
    assert schedule(endless, epochs=1) == Schedule("constant", 0, 0, 0.0)
    assert schedule(endless, linear, steps=9) == Schedule("linear", 0, 45, 0.0)
    with pytest.raises(ConfigError, match=r"set train\.steps or schedule\.steps"):
        schedule(endless, linear, epochs=1)


def test_which_datasets_may_draw_random_numbers() -> None:
    dataset = Counted("global", 3)
    assert draws(dataset) and draws([1, 2])
    dataset.draws = False  # type: ignore[attr-defined]
    assert not draws(dataset)


def test_a_gan_trains_through_a_session() -> None:
    importlib.import_module("torch._dynamo")
    session = session_of(Gan(), config_of("single", *SMALL, "train.micro_steps=2"))
    before = {name: tensor.clone() for name, tensor in session.spread.trainable().items()}
    assert all(one.outcome.grad_norm > 0 for one in step_through(session, 3))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in session.spread.trainable().items())
