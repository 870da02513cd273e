"""Law 4: whatever the layout, the run computes what one device computes."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.layout import Layout, parse_layout
from allranks.models.moe import MoETransformer
from allranks.parallel.batchnorm import has_batch_statistics
from allranks.task import Hints
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
from tests.distributed.covering import covering_sample
from tests.distributed.pool import Pools
from tests.distributed.sessions import (
    config_of,
    initial_model,
    parts_of,
    processes_of,
    session_of,
    step_through,
    together,
)
from tests.distributed.tasks import IGNORED, MODELS, Tiny

pytestmark = pytest.mark.distributed

STEPS = 3
LAYOUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "single": ("single", (1,)),
    "data_parallel": ("data_parallel", (1,)),
    "ddp": ("ddp", (2, 3, 4)),
    "fsdp": ("fsdp", (2, 3, 4)),
    "grad_op": ("fsdp,sharding=grad_op", (2, 3, 4)),
    "none": ("fsdp,sharding=none", (2, 3, 4)),
    "hsdp": ("dp_replicate=2,dp_shard=2", (4,)),
    "optimizer": ("dp_shard=*,sharding=optimizer", (2, 3, 4)),
    "tp": ("tp=*", (2, 3, 4)),
    "tp-ddp": ("tp=2,dp_replicate=2", (4,)),
    "tp-fsdp": ("tp=2,dp_shard=2,recompute=full", (4,)),
    "placement": ("placement", (1,)),
    "placement-ddp": ("placement,dp_replicate=2", (2,)),
}
# Of eight processes, which two cores have not often the time for: by default one case, in all of them every model.
LARGE: dict[str, tuple[str, tuple[int, ...]]] = {"hsdp-tp": ("dp_replicate=2,dp_shard=2,tp=2", (8,))}
MICRO_STEPS = (1, 3)
# 12 divides by every world size, 13 by none; of 5 samples in 3 micro-steps some rank has none (a filler).
GLOBAL_BATCHES = (12, 13, 5)
CLIPPED = 0.05  # below every norm that these models have
MAX_NORMS = (None, CLIPPED)
OPTIMIZERS = {
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.01"),
}


class Case(NamedTuple):
    """One line of the table."""

    layout: str
    world_size: int
    model: str
    micro_steps: int
    global_batch: int
    max_norm: float | None
    optimizer: str

    def __str__(self) -> str:
        clip = "unclipped" if self.max_norm is None else "clipped"
        cut = f"{self.global_batch}in{self.micro_steps}"
        return f"{self.layout}x{self.world_size}-{self.model}-{cut}-{clip}-{self.optimizer}"


RUNS: list[Any] = [*product(MICRO_STEPS, GLOBAL_BATCHES, MAX_NORMS, OPTIMIZERS)]


def spread_over(layouts: Mapping[str, tuple[str, Sequence[int]]]) -> list[tuple[str, int, str]]:
    """Layout, world size and model, in every combination."""
    return [(layout, size, model) for layout, (_, sizes) in layouts.items() for size in sizes for model in MODELS]


TABLE = [Case._make((*spread, *run)) for spread in spread_over(LAYOUTS) for run in RUNS]
SAMPLE = [*covering_sample(TABLE), Case("hsdp-tp", 8, "transformer", 3, 13, CLIPPED, "adamw")]
SPREAD = spread_over(LAYOUTS | LARGE)
# Of every layout with every model, runs that hold every pair of what a run may be.
FULL = [Case._make((*spread, *run)) for spread in SPREAD for run in covering_sample(RUNS)]


def record(cases: Sequence[Case]) -> list[list[RecordedStep]]:
    """In a worker: the steps of each case, all of one layout and world size."""
    found = []
    processes = None
    for case in cases:
        layout, _ = (LAYOUTS | LARGE)[case.layout]
        cut = f"train.micro_steps={case.micro_steps}", f"train.global_batch={case.global_batch}"
        clip = () if case.max_norm is None else (f"train.max_norm={case.max_norm}",)
        config = config_of(layout, *cut, *clip, *OPTIMIZERS[case.optimizer], steps=STEPS)
        processes = processes or processes_of(config)
        found.append(record_run(Tiny(kind=case.model), config, processes, STEPS))
    return found


def data_ranks(case: Case) -> range:
    """One of all the ranks that see the same samples, for each share of them."""
    layout = Layout.resolve(parse_layout((LAYOUTS | LARGE)[case.layout][0]), case.world_size)
    return range(0, case.world_size, layout.tp)


def reference(case: Case, ranks: Sequence[Sequence[RecordedStep]]) -> list[ReferenceStep]:
    """What one device computes from the very samples that the ranks fed."""
    task = Tiny(kind=case.model)
    dataset, model = task.dataset("train"), initial_model(task).double()
    batches = []
    for step in range(STEPS):
        positions = fed(ranks, step, data_ranks(case))
        assert list(positions) == list(range(step * case.global_batch, (step + 1) * case.global_batch))
        batch = default_collate([dataset[sample] for sample in positions.values()])
        batch["x"] = batch["x"].double() if batch["x"].is_floating_point() else batch["x"]
        batches.append((batch, int((batch["y"] != IGNORED).sum())))
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.01),
    }
    # What a batch statistic sees is a micro-step (law 2).
    parts = case.micro_steps if has_batch_statistics({"": model}) else 1
    make, forward = makers[case.optimizer], lambda m, b: loss_of(task, m, b, parts)
    return plain_loop(model, make, batches, forward, case.max_norm, finish=update_balance)


def update_balance(model: nn.Module) -> None:
    """What the user of a mixture of experts does after each update."""
    if isinstance(model, MoETransformer):
        model.update_balance()


def loss_of(task: Tiny, model: nn.Module, batch: Any, num_parts: int) -> torch.Tensor:
    """The sum over consecutive parts of near-equal size."""
    cut = (value.tensor_split(num_parts) for value in (batch["x"], batch["y"]))
    losses = [task.loss(model(x), {"y": y}) for x, y in zip(*cut, strict=True)]
    return torch.stack(losses).sum()


def check(pool: Pools, cases: Sequence[Case]) -> None:
    recorded = pool(cases[0].world_size).run(record, cases, timeout=240)
    for index, case in enumerate(cases):
        ranks = [rank[index] for rank in recorded]
        differences = compare(ranks, reference(case, ranks), adaptive=case.optimizer == "adamw")
        assert not differences, f"{case}: {'; '.join(map(str, differences[:5]))}"


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_equal_to_one_device(pool: Pools, case: Case) -> None:
    check(pool, [case])


@pytest.mark.full
@pytest.mark.parametrize("same", SPREAD, ids=lambda same: f"{same[0]}x{same[1]}-{same[2]}")
def test_equal_to_one_device_in_every_layout_with_every_model(pool: Pools, same: tuple[str, int, str]) -> None:
    check(pool, [case for case in FULL if case[:3] == same])


class Turns(nn.Module):
    """Its blocks take turns: a unit of one micro-step has no part in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.ends = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3, bias=False)})
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        turn = self.calls % 2
        found: torch.Tensor = self.ends["ab"[turn]](self.blocks[turn](x))
        return found


class TurnsTask(Tiny):
    declared: bool = False

    def model(self) -> nn.Module:
        return Turns()

    def hints(self) -> Hints:
        return Hints(optional=("blocks.*", "ends.*") if self.declared else ())


def take_turns(layout: str, declared: bool) -> Any:
    config = config_of(layout, "train.global_batch=13", "train.micro_steps=3", *OPTIMIZERS["sgd"])
    session = session_of(TurnsTask(declared=declared), config)
    model = session.spread.bare()
    assert isinstance(model, Turns)
    model.calls = 0
    list(step_through(session, STEPS))
    return parts_of(session)


@pytest.mark.parametrize(
    ("layout", "world_size", "declared"),
    [
        ("ddp", 2, True),
        ("fsdp", 2, False),
        ("fsdp,sharding=none", 2, False),
        ("dp_replicate=2,dp_shard=2", 4, True),
    ],
)
def test_units_that_the_last_micro_step_does_not_reach_keep_their_gradients(
    pool: Pools, layout: str, world_size: int, declared: bool
) -> None:
    """Undeclared, HSDP refuses (see below) and DDP raises."""
    alone = together(pool(1).run(take_turns, "single", declared))
    found = together(pool(world_size).run(take_turns, layout, declared))
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-15), name


def test_the_table_holds_what_it_should() -> None:
    """Some rank has no sample in a micro-step, unevenly many targets, and clipping that clips."""
    assert min(GLOBAL_BATCHES) // max(MICRO_STEPS) < max(max(sizes) for _, sizes in LAYOUTS.values())
    assert any(case.global_batch % case.world_size for case in SAMPLE)
    assert {case.world_size for case in SAMPLE} == {1, 2, 3, 4, 8}
