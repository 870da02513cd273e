"""Law 4 for tables: a recommender with an nn.EmbeddingBag, which fsdp cuts by row and tp leaves whole."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.task import Hints, Task
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, processes_of, session_of
from tests.distributed.tasks import NUM_SAMPLES

pytestmark = pytest.mark.distributed

ITEMS, USERS, WIDTH, LONGEST, NOTHING = 12, 6, 4, 5, 0
ONLY = (*SGD, "optimizer.weight_decay=0")
Shapes = dict[str, tuple[int, ...]]


class Baskets(torch.utils.data.Dataset[Any]):
    """user; bag: 0 to 5 items, filled up with NOTHING; item: one more, and whether the user took it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        bag = torch.randint(1, ITEMS, (index % (LONGEST + 1),), generator=generator)
        item = torch.randint(1, ITEMS, (), generator=generator)
        taken = torch.rand((), generator=generator, dtype=torch.float64).round()
        bag = functional.pad(bag, (0, LONGEST - len(bag)), value=NOTHING)
        return {"user": index % USERS, "bag": bag, "item": item, "taken": taken}


class TwoTowers(nn.Module):
    """A user with what is in the basket, beside an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.baskets = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean", padding_idx=NOTHING)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, user: torch.Tensor, bag: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        wanted = torch.tanh(self.mix(self.users(user) + self.baskets(bag)))
        found: torch.Tensor = (wanted * self.items(item)).sum(-1)
        return found


class Recommending(Task):
    def model(self) -> nn.Module:
        return TwoTowers()

    def dataset(self, split: str) -> Any:
        return Baskets()

    def hints(self) -> Hints:
        return Hints(tensor={"users": "vocab", "items": "vocab"})

    def inputs(self, batch: Any) -> Any:
        return batch["user"], batch["bag"], batch["item"]

    def targets(self, batch: Any) -> int:
        return len(batch["user"])

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(output, batch["taken"], reduction="sum")


def record(layout: str) -> tuple[list[RecordedStep], Shapes]:
    """In a worker: three steps, and the shape of what this rank holds of each table."""
    config = config_of(layout, "train.global_batch=10", "train.micro_steps=2", "train.max_norm=0.05", *ONLY)
    processes = processes_of(config)
    spread = session_of(Recommending(), config, processes).spread
    tables = ("baskets.weight", "items.weight")
    shapes = {name: tuple(spread.local(name).shape) for name in tables}
    return record_run(Recommending(), config, processes, 3), shapes


@pytest.mark.parametrize(
    ("layout", "bag_rows", "item_rows"), [("fsdp", ITEMS // 2, ITEMS // 2), ("tp=2", ITEMS, ITEMS // 2)]
)
def test_an_embedding_bag_learns_as_on_one_device(pool: Pools, layout: str, bag_rows: int, item_rows: int) -> None:
    recorded = pool(2).run(record, layout)
    ranks = [steps for steps, _ in recorded]
    held = {"baskets.weight": (bag_rows, WIDTH), "items.weight": (item_rows, WIDTH)}
    assert [shapes for _, shapes in recorded] == [held] * 2
    task, data_ranks = Recommending(), range(2 if layout == "fsdp" else 1)
    dataset, model = task.dataset("train"), initial_model(task).double()
    work = [(default_collate([dataset[s] for s in fed(ranks, step, data_ranks).values()]), 10) for step in range(3)]
    reference = plain_loop(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        work,
        lambda module, batch: task.loss(module(*task.inputs(batch)), batch),
        0.05,
    )
    assert compare(ranks, reference) == []
    moved = (reference[-1].parameters["baskets.weight"] != initial_model(task).baskets.weight).any(dim=1)
    assert moved[NOTHING + 1 :].any() and not moved[NOTHING]
