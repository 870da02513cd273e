"""Law 4 for experts that are cut: the run computes what one device computes, and balances bit by bit alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import default_collate

from allranks.layout import Layout, parse_layout
from allranks.models.moe import MoETransformer
from allranks.training.validate import validate
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import (
    SGD,
    config_of,
    initial_model,
    parts_of,
    processes_of,
    session_of,
    step_through,
    together,
)
from tests.distributed.tasks import IGNORED, StarvedTask, Tiny
from tests.training.snapshots import check_exchange, contents_of, find, saver_of

pytestmark = pytest.mark.distributed

STEPS = 3
CLIPPED = "train.max_norm=0.05"  # below every norm that the model has
TASK = Tiny(kind="moe")


class Case(NamedTuple):
    """A layout, and how a step is cut: of 5 samples in 3 micro-steps some rank has none (a filler)."""

    layout: str
    world_size: int
    global_batch: int
    micro_steps: int
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.layout, f"{self.global_batch}in{self.micro_steps}", *self.more))

    @property
    def overrides(self) -> tuple[str, ...]:
        cut = f"train.global_batch={self.global_batch}", f"train.micro_steps={self.micro_steps}"
        return (*SGD, *cut, *self.more)

    @property
    def data_ranks(self) -> range:
        layout = Layout.resolve(parse_layout(self.layout), self.world_size)
        return range(0, self.world_size, layout.tp * layout.cp)


CASES = [
    Case("dp_replicate=2,ep=2", 2, 12, 1),
    Case("dp_replicate=2,ep=2", 2, 13, 3, (CLIPPED,)),
    Case("dp_replicate=4,ep=2", 4, 13, 3),
    Case("dp_replicate=4,ep=4", 4, 5, 3, (CLIPPED,)),
    Case("dp_shard=2,ep=2", 2, 13, 3),
    Case("dp_replicate=2,dp_shard=2,ep=2", 4, 5, 3, (CLIPPED,)),
    Case("dp_shard=4,ep=2,recompute=full", 4, 13, 1),
    Case("dp_shard=4,ep=2", 4, 5, 3, (CLIPPED,)),
    Case("dp_shard=2,ep=2,sharding=optimizer", 2, 13, 3),
    Case("dp_shard=4,ep=2,sharding=optimizer", 4, 5, 3, (CLIPPED,)),
    Case("dp_replicate=2,tp=2,ep=2", 4, 5, 3),
]


def _cuts(few: int, place: int) -> list[tuple[int, int, tuple[str, ...]]]:
    """Half of the pairs of a batch, a number of micro-steps and clipping or none: the layout at the next place has the
    others. Of `few` samples each data rank has one.
    """
    if place % 2:
        return [(12, 3, (CLIPPED,)), (few, 1, ()), (13, 1, (CLIPPED,))]
    return [(12, 1, ()), (few, 3, (CLIPPED,)), (13, 3, ())]


MORE = [
    Case(layout, world_size, batch, micro_steps, more)
    for place, (layout, world_size) in enumerate(
        (
            ("dp_replicate=3,dp_shard=2,ep=3", 6),
            ("dp_replicate=2,dp_shard=3,ep=2", 6),
            ("dp_replicate=2,ep=2,sharding=none", 2),
            ("dp_shard=2,ep=2,sharding=grad_op", 2),
            ("dp_shard=2,ep=2,recompute=selective", 2),
            ("dp_replicate=2,ep=2,recompute=full", 2),
            ("dp_shard=2,tp=2,ep=2", 4),
            ("dp_shard=6,ep=2", 6),  # three ranks share three experts
            ("dp_shard=6,ep=3", 6),
            ("dp_shard=8,ep=2", 8),  # four ranks share two experts, column by column
            ("dp_replicate=2,dp_shard=4,ep=2", 8),
            ("dp_replicate=2,dp_shard=4,ep=2,sharding=grad_op", 8),
            ("dp_replicate=2,dp_shard=2,cp=2,ep=4", 8),  # those of one sequence alone share them
            ("dp_replicate=2,dp_shard=2,ep=2,sharding=optimizer", 4),
            *{(case.layout, case.world_size): None for case in CASES},
        )
    )
    for batch, micro_steps, more in _cuts(9 if world_size == 8 else 6, place)
]


class Six(Tiny):
    """Six experts, so that three ranks can share them too."""

    def model(self) -> MoETransformer:
        return MoETransformer(11, 2, 48, 24, num_experts=6, top_k=2, ffn=5, max_seq=6, num_kv_heads=12, rate=0.01)


def task_of(case: Case) -> Tiny:
    return Six(kind="moe") if case.world_size == 6 else TASK


def record(case: Case) -> tuple[list[RecordedStep], dict[str, torch.Tensor]]:
    """In a worker: the steps, and the biases at the end, which the same session on its way has left."""
    config = config_of(case.layout, *case.overrides, steps=STEPS)
    processes = processes_of(config)
    steps = record_run(task_of(case), config, processes, STEPS)
    session = session_of(task_of(case), config, processes)
    list(step_through(session, STEPS))
    return steps, {name: session.spread.local(name).clone() for name in session.spread.map if name.endswith("bias")}


def reference(
    case: Case, ranks: Sequence[Sequence[RecordedStep]], *, balanced: bool = True
) -> tuple[list[ReferenceStep], MoETransformer]:
    """What one device computes from the very samples that the ranks fed."""
    task = task_of(case)
    dataset, model = task.dataset("train"), initial_model(task).double()
    batches = []
    for step in range(STEPS):
        batch = default_collate([dataset[sample] for sample in fed(ranks, step, case.data_ranks).values()])
        batches.append((batch, int((batch["y"] != IGNORED).sum())))
    steps = plain_loop(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        batches,
        lambda m, b: task.loss(m(b["x"]), b),
        0.05 if CLIPPED in case.more else None,
        finish=lambda _: model.update_balance() if balanced else None,
    )
    return steps, model


def check(pool: Pools, case: Case) -> None:
    found = pool(case.world_size).run(record, case, timeout=240)
    ranks = [steps for steps, _ in found]
    expected, model = reference(case, ranks)
    differences = compare(ranks, expected)
    assert not differences, f"{case}: {'; '.join(map(str, differences[:5]))}"
    for _, biases in found:
        assert len(biases) == 2
        for name, bias in biases.items():
            assert torch.equal(bias, model.get_buffer(name)) and bias.abs().max() > 0


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_one_device(pool: Pools, case: Case) -> None:
    check(pool, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in MORE if case not in CASES], ids=str)
def test_equal_to_one_device_in_every_case(pool: Pools, case: Case) -> None:
    check(pool, case)


@pytest.mark.full
def test_without_the_balance_the_reference_would_compute_something_else(pool: Pools) -> None:
    """The bias of the first step moves which experts are chosen in the next two: a wrong one cannot hide."""
    case = CASES[0]
    ranks = [steps for steps, _ in pool(2).run(record, case)]
    steps, _ = reference(case, ranks, balanced=False)
    found = compare(ranks, steps)
    assert {difference.step for difference in found if difference.what == "loss"} == {1, 2}
    assert all(difference.what.endswith("router.bias") for difference in found if difference.step == 0)


# experts that no token reaches


def run_starved(layout: str) -> Any:
    """In a worker: the end of three steps with momentum, weight decay and clipping."""
    more = ("train.global_batch=5", "train.micro_steps=3", "optimizer.weight_decay=0.1", CLIPPED)
    session = session_of(StarvedTask(kind="moe"), config_of(layout, *SGD, *more))
    list(step_through(session, STEPS))
    return parts_of(session)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("dp_replicate=2,ep=2", 2),
        ("dp_replicate=2,ep=2,recompute=full", 2),
        ("dp_replicate=4,ep=2", 4),
        ("dp_replicate=2,tp=2,ep=2", 4),
        ("dp_shard=4,ep=2", 4),
        ("dp_shard=4,ep=2,sharding=optimizer", 4),
    ],
)
def test_experts_that_no_token_reaches_decay_as_on_one_device(pool: Pools, layout: str, world_size: int) -> None:
    """There they are one parameter with the others, whose gradient is zeros for them."""
    alone = together(pool(1).run(run_starved, "single"))
    found = together(pool(world_size).run(run_starved, layout, timeout=20))
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14), name


# checkpoints (laws 8 and 9) and evaluation

SMALL = ("train.global_batch=10", "optimizer.lr=0.01")
LAYOUTS = {
    "single": ("single", 1),
    "fsdp": ("fsdp", 3),
    "ep": ("dp_replicate=2,ep=2", 2),
    "ep-ddp": ("dp_replicate=4,ep=2", 4),
    "ep-fsdp": ("dp_shard=4,ep=4", 4),
    "ep-shards": ("dp_shard=4,ep=2", 4),
    "ep-optimizer": ("dp_shard=4,ep=2,sharding=optimizer", 4),
}
PAIRS = [
    *(("ep", "single"), ("single", "ep-ddp"), ("ep-ddp", "fsdp"), ("fsdp", "ep-fsdp"), ("ep-fsdp", "ep")),
    *(("ep-optimizer", "fsdp"), ("ep-fsdp", "ep-optimizer"), ("ep-ddp", "ep-fsdp"), ("ep-fsdp", "ep-ddp")),
    *(("ep-shards", "single"), ("single", "ep-shards"), ("ep-shards", "ep-ddp"), ("ep-optimizer", "ep-shards")),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_one_layout_loads_what_another_saved(pool: Pools, tmp_path: Path, one: str, other: str) -> None:
    """After three steps, of which an odd number moves the bias somewhere else."""
    both = [(config_of(layout, *SMALL), size) for layout, size in (LAYOUTS[one], LAYOUTS[other])]
    exchanged = check_exchange(pool, tmp_path, TASK, both[0], both[1], STEPS)
    assert len(exchanged) > 60
    assert exchanged["layers.0.feed_forward.router.bias"].abs().max() > 0


def resumed(directory: Path, layout: str) -> bool:
    """In a worker: whether a resumed session ends bit by bit where the uninterrupted one does."""
    overrides = ("train.global_batch=13", "train.micro_steps=3")
    session, contents = contents_of(TASK, config_of(layout, *overrides, precision="float32", steps=6), STEPS)
    saver_of(session, contents, directory).save(STEPS)
    list(step_through(session, STEPS))
    again, contents = contents_of(TASK, config_of(layout, *overrides, precision="float32", steps=6), 0)
    contents.load(find(directory, again))
    list(step_through(again, STEPS))
    whole, parts = parts_of(session), parts_of(again)
    return all(torch.equal(whole[name][2], parts[name][2]) for name in whole)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp_replicate=4,ep=2", "dp_replicate=2,dp_shard=2,ep=2", "dp_shard=4,ep=2"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(pool: Pools, tmp_path: Path, layout: str) -> None:
    assert pool(4).run(resumed, tmp_path, layout) == [True] * 4


class Validated(Tiny):
    """61 samples on 2 or 4 ranks: some rank's last batch is a filler."""

    def dataset(self, split: str) -> Any:
        return super().dataset("train")


def validated(layout: str) -> tuple[dict[str, float], bool]:
    """In a worker: an evaluation, and whether it has left every buffer as it was."""
    session = session_of(Validated(kind="moe"), config_of(layout, *SMALL))
    list(step_through(session, 2))
    before = parts_of(session)
    found = validate(session)
    return found, all(torch.equal(parts_of(session)[name][2], part) for name, (_, _, part) in before.items())


def test_an_evaluation_is_that_of_one_process_and_counts_nothing(pool: Pools) -> None:
    ((alone, _),) = pool(1).run(validated, "single")
    for layout, size in (("dp_replicate=2,ep=2", 2), ("dp_shard=4,ep=2", 4)):
        for found, unchanged in pool(size).run(validated, layout):
            assert unchanged and found == pytest.approx(alone, rel=1e-12)
