"""Laws 2, 4, 6 and 8 where each sequence is cut over processes (cp)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.data.micro_step import StepBatch
from allranks.layout import Layout, parse_layout
from allranks.models.transformer import Transformer
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.task import Task
from allranks.training.validate import validate
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
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
from tests.distributed.tasks import IGNORED

pytestmark = pytest.mark.distributed

STEPS, SEQ, VOCABULARY = 2, 12, 11
RING = "layout.context=ring"


class Sentences(torch.utils.data.Dataset[Any]):
    """x: 12 words of 11, y: the words to be found; in some samples none of the first half is a target."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randint(0, VOCABULARY, (2, SEQ), generator=generator)
        y[: 2 * (index % 5)] = IGNORED
        return {"x": x, "y": y}


class Encoder(nn.Module):
    """torch's own encoder layers, whose attention is not causal, over words and learned positions."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.padded = padded
        self.words, self.places = nn.Embedding(VOCABULARY, 24), nn.Embedding(SEQ, 24)
        layer = nn.TransformerEncoderLayer(24, 6, 24, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(x.shape[1]) if positions is None else positions
        value = self.words(x) + self.places(places)
        found: torch.Tensor = self.head(self.layers(value, src_key_padding_mask=(x == 3) if self.padded else None))
        return found * self.scale


class NormedBlock(nn.Module):
    """A BatchNorm before attention: its statistics are over all samples and all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.layer = nn.TransformerEncoderLayer(24, 6, 24, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.norm(x.mT).mT))


def normed() -> nn.Module:
    """Words through two of them."""
    blocks = nn.Sequential(NormedBlock(), NormedBlock())
    return nn.Sequential(nn.Embedding(VOCABULARY, 24), blocks, nn.Linear(24, VOCABULARY))


def decoder() -> nn.Module:
    """Grouped queries: of 12 heads, 4 of keys."""
    return Transformer(VOCABULARY, 2, 48, 12, ffn=12, max_seq=SEQ, num_kv_heads=4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": decoder,
    "encoder": lambda: Encoder(padded=False),
    "padded": lambda: Encoder(padded=True),
    "normed": normed,
}


class Sentence(Task):
    """Cross-entropy of one of MODELS on Sentences."""

    kind: str = "decoder"

    def model(self) -> nn.Module:
        return MODELS[self.kind]()

    def dataset(self, split: str) -> Any:
        return Sentences()

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="sum")

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        counted = batch["y"] != IGNORED
        return {"accuracy": ((output.argmax(-1) == batch["y"])[counted].sum(), counted.sum())}


class Case(NamedTuple):
    """One line of the table."""

    layout: str
    overrides: tuple[str, ...] = ()
    kind: str = "decoder"
    micro_steps: int = 1

    def __str__(self) -> str:
        return "-".join(
            (self.layout, *(o.rpartition("=")[2] for o in self.overrides), self.kind, str(self.micro_steps))
        )


CASES = [
    Case("cp=2"),
    Case("cp=2", (RING,), micro_steps=3),
    Case("cp=3", kind="encoder"),
    Case("cp=3", (RING,), kind="encoder"),
    Case("cp=2", kind="padded"),
    Case("cp=3", (RING,)),
    Case("cp=4"),
    Case("cp=2", kind="normed"),
    Case("dp_replicate=2,cp=2", (RING,), kind="normed"),
    Case("dp_shard=2,cp=2,recompute=full", kind="normed"),
    Case("cp=2,recompute=full", (RING,)),
    Case("cp=2,recompute=selective"),
    Case("cp=2,recompute=selective", (RING,)),
    Case("dp_replicate=2,cp=2", micro_steps=3),
    Case("dp_shard=2,cp=2", (RING,), micro_steps=3),
    Case("dp_shard=2,cp=2,recompute=full"),
    Case("dp_shard=2,cp=2,sharding=grad_op", kind="encoder"),
    Case("dp_replicate=2,cp=2,sharding=none", micro_steps=3),
    Case("dp_shard=2,cp=2,sharding=optimizer"),
    Case("tp=2,cp=2", micro_steps=3),
    Case("tp=2,cp=2,recompute=full", (RING,)),
    Case("tp=2,cp=2", (RING,), kind="encoder"),
]
LARGE = [
    Case("dp_replicate=2,dp_shard=2,cp=2", micro_steps=3),
    Case("dp_shard=2,tp=2,cp=2", (RING,)),
    Case("dp_replicate=2,tp=2,cp=2"),
]


def layout_of(case: Case) -> Layout:
    config = parse_layout(case.layout)
    return Layout.resolve(config, size_of(case.layout))


def size_of(layout: str) -> int:
    """Processes of a layout string without a star."""
    config, size = parse_layout(layout), 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
        degree = getattr(config, axis)
        assert isinstance(degree, int)
        size *= degree
    return size


def record(case: Case, global_batch: int) -> list[RecordedStep]:
    """In a worker: the steps."""
    sgd = "optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01"
    cut = f"train.micro_steps={case.micro_steps}", f"train.global_batch={global_batch}", "train.max_norm=0.05"
    config = config_of(case.layout, *cut, *sgd, *case.overrides, steps=STEPS)
    return record_run(Sentence(kind=case.kind), config, processes_of(config), STEPS)


def reference(case: Case, ranks: Sequence[Sequence[RecordedStep]], global_batch: int) -> list[ReferenceStep]:
    """What one device computes from the very samples that the ranks fed."""
    task, layout = Sentence(kind=case.kind), layout_of(case)
    dataset, model = task.dataset("train"), initial_model(task).double()
    batches = []
    for step in range(STEPS):
        # One of the ranks that see the same samples speaks for them.
        positions = fed(ranks, step, range(0, layout.world_size, layout.cp * layout.tp))
        assert list(positions) == list(range(step * global_batch, (step + 1) * global_batch))
        batch = default_collate([dataset[sample] for sample in positions.values()])
        batches.append((batch, int((batch["y"] != IGNORED).sum())))
    optimizer = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)  # noqa: E731
    return plain_loop(model, optimizer, batches, lambda m, b: task.loss(m(b["x"]), b), 0.05)


def check(pool: Pools, case: Case) -> None:
    global_batch = 5  # in three micro-steps some data rank has none (a filler)
    ranks = pool(layout_of(case).world_size).run(record, case, global_batch, timeout=240)
    differences = compare(ranks, reference(case, ranks, global_batch))
    assert not differences, "; ".join(map(str, differences[:5]))


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_one_device(pool: Pools, case: Case) -> None:
    check(pool, case)


@pytest.mark.full
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_equal_to_one_device_on_eight(pool: Pools, case: Case) -> None:
    check(pool, case)


def learnt(layout: str) -> dict[str, torch.Tensor]:
    """In a worker: what two steps have taught the BatchNorms."""
    config = config_of(layout, "train.global_batch=5", "train.micro_steps=1", "optimizer.name=sgd", steps=STEPS)
    session = session_of(Sentence(kind="normed"), config)
    list(step_through(session, STEPS))
    return {name: session.spread.local(name) for name in session.spread.map if "running" in name or "num_" in name}


def test_batch_norms_learn_what_they_learn_on_one_device(pool: Pools) -> None:
    (alone,) = pool(1).run(learnt, "single")
    assert len(alone) == 6 and int(alone["1.0.norm.num_batches_tracked"]) == STEPS
    for found in pool(4).run(learnt, "dp_replicate=2,cp=2"):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


# law 6


class Dropping(Sentence):
    """Dropout inside and outside of attention, over samples that are all the same: losses differ by masks alone."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(24, 4, 24, dropout=0.3, batch_first=True)
        layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(VOCABULARY, 24), layers, nn.Linear(24, VOCABULARY))

    def dataset(self, split: str) -> Any:
        return [{"x": torch.ones(SEQ, dtype=torch.int64), "y": torch.ones(SEQ, dtype=torch.int64)}] * 24


class LossesOnly(Passes):
    """Keeps this rank's own losses."""

    def __init__(self, inner: Passes) -> None:
        self.inner = inner
        self.losses: list[float] = []

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        for sums in self.inner.run(batch, scale):
            self.losses.append(float(sums.loss))
            yield sums


def drop(layout: str) -> tuple[list[float], dict[str, Any]]:
    watched: list[LossesOnly] = []

    def watch(passes: Passes) -> Passes:
        watched.append(LossesOnly(passes))
        return watched[0]

    torch.rand(dist.get_rank() + 1)  # the state that is found does not matter
    config = config_of(layout, "optimizer.name=sgd", "optimizer.lr=1e-30", "train.global_batch=4")
    session = session_of(Dropping(), config, observe=watch)
    list(step_through(session, 3))
    return watched[0].losses, parts_of(session)


def test_masks_differ_by_position_and_step_and_are_the_same_again(pool: Pools) -> None:
    for layout in ("cp=2", "cp=2,recompute=full"):
        first, second = (pool(2).run(drop, layout) for _ in range(2))
        assert [losses for losses, _ in first] == [losses for losses, _ in second]
        assert len({loss for losses, _ in first for loss in losses}) == 6
    together([parts for _, parts in first])  # every process holds the same parameters


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["dp_replicate=2,cp=2", "dp_shard=2,cp=2", "dp_shard=2,tp=2", "tp=2,cp=2"])
def test_masks_of_products_differ_where_samples_or_positions_do(pool: Pools, layout: str) -> None:
    """Ranks of one tp group have one loss between them; whoever else has the same would have the same masks."""
    first, second = (pool(4).run(drop, layout) for _ in range(2))
    assert [losses for losses, _ in first] == [losses for losses, _ in second]
    losses = [tuple(losses) for losses, _ in first]
    groups = 2 if "tp=2" in layout else 4
    assert len(set(losses)) == groups
    assert len({loss for one in losses for loss in one}) == 3 * groups
    together([parts for _, parts in first])


# evaluation


def evaluate(layout: str, overrides: Sequence[str], kind: str) -> dict[str, float]:
    """In a worker."""
    return validate(session_of(Sentence(kind=kind), config_of(layout, "train.global_batch=5", *overrides)))


@pytest.mark.parametrize(
    ("layout", "world_size", "overrides", "kind"),
    [
        ("cp=2", 2, (), "encoder"),  # torch's encoder layers would go past attention's function here
        ("cp=3", 3, (RING,), "decoder"),
        ("dp_replicate=2,cp=2", 4, (RING,), "decoder"),
        ("dp_shard=2,cp=2", 4, (), "decoder"),
    ],
)
def test_every_position_is_measured_once(
    pool: Pools, layout: str, world_size: int, overrides: Sequence[str], kind: str
) -> None:
    task = Sentence(kind=kind)
    batch = default_collate([task.dataset("validation")[index] for index in range(29)])
    with torch.no_grad():
        output = initial_model(task).double().eval()(batch["x"])
    counted = batch["y"] != IGNORED
    right = (output.argmax(-1) == batch["y"])[counted].sum()
    expected = {"accuracy": float(right / counted.sum()), "loss": float(task.loss(output, batch) / counted.sum())}
    for found in pool(world_size).run(evaluate, layout, overrides, kind):
        assert found == pytest.approx(expected, rel=1e-7)  # the accuracy above is a float32
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-13)
