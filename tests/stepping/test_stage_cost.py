"""What the pieces of a model compute, between which a pipeline is cut."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.errors import TaskError
from allranks.parallel.precision import choose_precision
from allranks.parallel.stage_plan import plan_stages
from allranks.profiling.fakes import build_fake, fake_mode
from allranks.rehearsing.ledger import Ledger
from allranks.rehearsing.rank_step import assemble_rank, processes_of
from allranks.rehearsing.world import fake_world
from allranks.stepping.stage_cost import count_between
from allranks.task import Task
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.rehearsing.tasks import configured
from tests.training.tasks import Gan

CONVOLUTIONS = [(1, 3, 8, 16), (2, 8, 16, 8), (2, 16, 32, 4), (2, 32, 64, 2)]  # stride, channels in and out, side
WORDS = 1000


class Pictures(Task):
    """A network of convolutions, whose first layers have few parameters and many operations."""

    def model(self) -> nn.Module:
        layers = [
            nn.Sequential(nn.Conv2d(into, out, 3, stride, padding=1), nn.ReLU())
            for stride, into, out, _ in CONVOLUTIONS
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4, 10))

    def dataset(self, split: str) -> Any:
        pictures = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return [{"x": picture, "y": number % 10} for number, picture in enumerate(pictures)]

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output, batch["y"], reduction="sum")


class Choosing(Pictures):
    """The same, with a branch on a value."""

    def model(self) -> nn.Module:
        return nn.Sequential(*super().model().children(), Branch())


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() < 1e9 else -x


class Language(nn.Module):
    """A large vocabulary whose last product no module makes, and a table that is made at the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1], dtype=torch.float32)[:, None] / WORDS
        hidden = self.embedding(x) + self.table
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(hidden, self.embedding.weight)


class Reading(Pictures):
    """Of numbers between 0 and 9, five in a sample, which are drawn anew each time."""

    def model(self) -> nn.Module:
        return Language()

    def dataset(self, split: str) -> Any:
        return Drawn()


class Drawn(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.randint(0, 10, (5,)) + random.randrange(2) + np.random.randint(2), "y": torch.zeros(5)}


def count(task: Task, module: nn.Module, *names: str, precision: str = "float32") -> list[float]:
    return count_between(task, task.dataset("train"), 0, choose_precision(precision, None, "cpu"), module, names)


def test_early_convolutions_count_by_their_positions_and_not_by_their_parameters() -> None:
    task = Pictures()
    module, names = task.model(), ("0", "1", "2", "3", "5")
    costs = count(task, module, *names)
    convolutions = [2 * 9 * into * out * side**2 for _, into, out, side in CONVOLUTIONS]
    ratio = costs[1] / convolutions[0]  # as many as samples were looked at
    assert costs == [0.0, *(ratio * flops for flops in convolutions), ratio * 2 * 256 * 10]
    assert plan_stages(module, range(2)).points == ("3",)
    plan = plan_stages(module, range(2), count=lambda module, names: count(task, module, *names))
    assert plan.points == ("2",) and plan.balanced == "balanced by operations"


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_what_a_model_computes_behind_its_last_block_counts_there(precision: str) -> None:
    """A head on a large vocabulary, though it multiplies by the embedding, takes blocks from its stage."""
    task, module = Reading(), Language().to(torch.float64 if precision == "float64" else torch.float32)
    before, *blocks = count(task, module, *(f"blocks.{i}" for i in range(4)), precision=precision)
    assert before == 0 and blocks[0] == blocks[1] == blocks[2] > 0
    assert blocks[3] == blocks[0] * (1 + WORDS / 16)
    assert plan_stages(module, range(2)).points == ("blocks.2",)
    assert plan_stages(module, range(2), count=lambda m, names: count(task, m, *names)).points == ("blocks.3",)


def test_the_model_and_the_generators_stay_as_they_were() -> None:
    """What a forward keeps in the model is kept in a copy, and it may be built without memory."""
    task, module = Reading(), Language()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    first = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    costs = count(task, module, "blocks.1")
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == first
    assert module.table is None
    mode = fake_mode()
    built, _ = build_fake(Language, mode)
    assert isinstance(built, nn.Module)
    with mode:
        assert count(task, built, "blocks.1") == costs
    assert count(task, module.to("meta"), "blocks.1") == costs


def test_what_cannot_be_counted_says_why() -> None:
    with pytest.raises(TaskError, match=r"_local_scalar_dense .* needs values, and a trace has none \(in 6"):
        count(Choosing(), Choosing().model(), "1")
    with pytest.raises(TaskError, match=r"^Gan has a step\(\) of its own$"):
        count(Gan(), nn.Linear(2, 2), "")
    with pytest.raises(TaskError, match=r"^it has no products of matrices, convolutions or attention$"):
        count(Pictures(), nn.Sequential(nn.ReLU(), nn.ReLU()), "1")


def stages_of(task: Task, layout: str) -> Any:
    decisions = session_of(task, config_of(layout, "train.global_batch=8", precision="float32")).spread.decisions
    return next((str(d.what), str(d.because)) for d in decisions if " stages over " in d.what)


@pytest.mark.distributed
def test_all_ranks_and_a_rehearsal_come_to_one_cut(pool: Pools) -> None:
    what = "2 stages over pp=2 begin at the model's start, "
    counted = (f"{what}2", "the model is a sequence of modules; balanced by operations")
    assert pool(2).run(stages_of, Pictures(), "pp=2") == [counted] * 2
    (first, why), (second, _) = pool(2).run(stages_of, Choosing(), "pp=2")
    assert first == second == f"{what}3"
    assert "balanced by parameters, as operations could not be counted: aten._local_scalar_dense" in why
    config, layout = configured(Pictures(), "pp=2", 2, "train.global_batch=8", "train.steps=3")
    for rank in range(2):
        with fake_world(rank, 2, "gloo"):
            told = assemble_rank(Pictures(), config, processes_of(rank, layout, "gloo", 2), Ledger(), fake_mode())
        assert counted in [(d.what, d.because) for d in told.decisions]
