"""Law 4 through pipelines: every schedule, and its products with the other axes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.layout import Layout, parse_layout
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.task import Hints
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
from tests.distributed.covering import covering_sample
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, processes_of
from tests.distributed.tasks import IGNORED, WIDTH, Block, Encoder, Tiny, scalar_gain, vector_gain
from tests.distributed.test_laws import update_balance

pytestmark = pytest.mark.distributed

STEPS = 3
BATCH = 24
CLIPPED = 0.05

# name -> the layout, the processes, and how many stages it makes
LAYOUTS: dict[str, tuple[str, int, int]] = {
    "1f1b2": ("pp=2", 2, 2),
    "1f1b3": ("pp=3", 3, 3),
    "1f1b4": ("pp=4", 4, 4),
    "gpipe": ("pp=2,schedule=gpipe", 2, 2),
    "interleaved": ("pp=2,schedule=interleaved", 2, 4),
    "looped_bfs": ("pp=2,schedule=looped_bfs", 2, 4),
    "interleaved_zb": ("pp=2,schedule=interleaved_zb", 2, 4),
    "zbv": ("pp=2,schedule=zbv", 2, 4),
    "dualpipev": ("pp=2,schedule=dualpipev", 2, 4),
    "ddp": ("pp=2,dp_replicate=2", 4, 2),
    "fsdp": ("pp=2,dp_shard=2", 4, 2),
    "grad_op": ("pp=2,dp_shard=2,sharding=grad_op", 4, 2),
    "none": ("pp=2,dp_shard=2,sharding=none", 4, 2),
    "zero1": ("pp=2,dp_shard=2,sharding=optimizer", 4, 2),
    "tp": ("pp=2,tp=2", 4, 2),
    "cp": ("pp=2,cp=2", 4, 2),
    "recompute": ("pp=2,recompute=full", 2, 2),
    "ep": ("pp=2,dp_replicate=2,ep=2", 4, 2),
    "ep-fsdp": ("pp=2,dp_shard=2,ep=2", 4, 2),
    "interleaved-ddp": ("pp=2,dp_replicate=2,schedule=interleaved", 4, 4),
    "interleaved-fsdp": ("pp=2,dp_shard=2,schedule=interleaved", 4, 4),
    "interleaved-tp": ("pp=2,tp=2,schedule=interleaved", 4, 4),
}


class Piped(nn.Module):
    """Words through four blocks; the embedding may be the head, too, and a gain may be everyone's."""

    calls: torch.Tensor

    def __init__(self, tied: bool, gains: Callable[[], nn.Parameter]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(WIDTH))  # the model's own: no stage's
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(gains()) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.embedding(x) + self.bias
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(self.norm(hidden) * self.bias)
        return found


class TwoStreams(nn.Module):
    """Blocks that take and give two tensors, by keyword, beside a mask of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Crossed() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        mask = (x > 2).unsqueeze(-1)
        left = self.embedding(x)
        right = torch.tanh(left)
        for block in self.blocks:
            left, right = block(left, other=right, mask=mask)
        return {"logits": self.head(left + right)}


class Crossed(nn.Module):
    """Two streams through one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, left: torch.Tensor, *, other: torch.Tensor, mask: torch.Tensor) -> Any:
        return left + torch.tanh(self.linear(other)) * mask, other - torch.tanh(self.linear(left))


def frozen() -> nn.Module:
    """The first stage has nothing to learn."""
    model = Piped(tied=False, gains=vector_gain)
    for part in (model.embedding, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    return model


def sharing() -> nn.Module:
    """The first and the last block are one layer."""
    model = Piped(tied=False, gains=vector_gain)
    last = model.blocks[3]
    first = model.blocks[0]
    assert isinstance(last, Block) and isinstance(first, Block)
    last.linear = first.linear
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: Piped(tied=True, gains=vector_gain),
    "scalars": lambda: Piped(tied=False, gains=scalar_gain),
    "frozen": frozen,
    "sharing": sharing,
    "streams": TwoStreams,
    "transformer": lambda: Transformer(11, 4, 32, 4, ffn=16, max_seq=6, num_kv_heads=2),
    "encoder": lambda: Encoder(num_layers=4),
    "moe": lambda: MoETransformer(11, 4, 32, 4, num_experts=4, top_k=2, ffn=5, max_seq=6, rate=0.01),
}
TENSOR: dict[str, Any] = {
    name: {"blocks.*.linear": "vocab"} for name in ("tied", "scalars", "frozen", "sharing", "streams")
}


class Staged(Tiny):
    """One of MODELS, on words."""

    kind: str = "tied"

    def model(self) -> nn.Module:
        return MODELS[self.kind]()

    def dataset(self, split: str) -> Any:
        return Tiny(kind="tied").dataset(split)

    def hints(self) -> Hints:
        return Hints(tensor=TENSOR.get(self.kind, {}))

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return super().loss(output["logits"] if isinstance(output, dict) else output, batch)


class Case(NamedTuple):
    """One line of the table."""

    layout: str
    model: str
    micro_steps: int
    clipped: bool

    def __str__(self) -> str:
        return f"{self.layout}-{self.model}-{self.micro_steps}{'-clipped' * self.clipped}"


TABLE = [
    Case(layout, model, micro_steps, clipped)
    for layout in LAYOUTS
    for model in MODELS
    if model == "moe" or not layout.startswith("ep")
    for micro_steps in (4, 6, 12)
    for clipped in (False, True)
]
SAMPLE = covering_sample(TABLE)


def record(cases: Sequence[Case]) -> list[list[RecordedStep]]:
    """In a worker: the steps of each case, all of one layout."""
    found, processes = [], None
    for case in cases:
        clip = (f"train.max_norm={CLIPPED}",) if case.clipped else ()
        cut = f"train.micro_steps={case.micro_steps}", f"train.global_batch={BATCH}"
        sgd = "optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9"
        config = config_of(LAYOUTS[case.layout][0], *cut, *clip, *sgd, steps=STEPS)
        processes = processes or processes_of(config)
        found.append(record_run(Staged(kind=case.model), config, processes, STEPS))
    return found


def told_by(case: Case) -> list[int]:
    """One of the ranks that see the same samples, for each share of them."""
    text, world_size, _ = LAYOUTS[case.layout]
    layout = Layout.resolve(parse_layout(text), world_size)
    apart = layout.tp * layout.cp
    return list(range(0, layout.dp * apart, apart))


def reference(case: Case, ranks: Sequence[Sequence[RecordedStep]]) -> list[ReferenceStep]:
    """What one device computes."""
    task = Staged(kind=case.model)
    dataset, model = task.dataset("train"), initial_model(task).double()
    batches = []
    for step in range(STEPS):
        positions = fed(ranks, step, told_by(case))
        assert list(positions) == list(range(step * BATCH, (step + 1) * BATCH))
        batch = default_collate([dataset[sample] for sample in positions.values()])
        batches.append((batch, int((batch["y"] != IGNORED).sum())))
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)  # noqa: E731
    forward, max_norm = lambda m, b: task.loss(m(b["x"]), b), CLIPPED if case.clipped else None
    return plain_loop(model, make, batches, forward, max_norm, finish=update_balance)


def check(pool: Pools, cases: Sequence[Case]) -> None:
    recorded = pool(LAYOUTS[cases[0].layout][1]).run(record, cases, timeout=240)
    for index, case in enumerate(cases):
        ranks = [rank[index] for rank in recorded]
        differences = compare(ranks, reference(case, ranks))
        assert not differences, f"{case}: {'; '.join(map(str, differences[:5]))}"


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_equal_to_one_device(pool: Pools, case: Case) -> None:
    check(pool, [case])


@pytest.mark.full
@pytest.mark.parametrize("same", list(dict.fromkeys(case[:2] for case in TABLE)), ids="-".join)
def test_equal_to_one_device_in_every_layout_with_every_model(pool: Pools, same: tuple[str, str]) -> None:
    check(pool, [case for case in TABLE if case[:2] == same])


LARGE: dict[str, tuple[str, int, int]] = {
    "fsdp-tp": ("pp=2,tp=2,dp_shard=2", 8, 2),
    "hsdp": ("pp=2,dp_replicate=2,dp_shard=2", 8, 2),
    "cp-fsdp": ("pp=2,cp=2,dp_shard=2", 8, 2),
    "cp-tp": ("pp=2,cp=2,tp=2", 8, 2),
    "interleaved-fsdp-tp": ("pp=2,tp=2,dp_shard=2,schedule=interleaved", 8, 4),
    "everything": ("pp=2,tp=2,cp=2,dp_shard=2,ep=2", 16, 2),
}
LAYOUTS |= {f"large-{name}": layout for name, layout in LARGE.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_products_of_three_axes_and_of_all(pool: Pools, name: str) -> None:
    """Sixteen processes on a tiny model for the product of all axes, which a model without experts cannot have."""
    models = ("moe",) if name == "everything" else ("transformer", "moe")
    check(pool, [Case(f"large-{name}", model, 6, clipped=True) for model in models])
