"""A checkpoint of one layout loads under any other: every tensor bit by bit, and proven by its digest."""

from pathlib import Path

import pytest
import torch

from tests.distributed.matrix import ROWS
from tests.distributed.matrix_models import Sentence, task_of
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model
from tests.distributed.tasks import Tiny
from tests.distributed.test_matrix import Case, config, runs
from tests.training.snapshots import check_exchange, check_round_trip

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 3),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
    "optimizer": ("dp_replicate=2,dp_shard=2,sharding=optimizer", 4),
    "tp": ("tp=3", 3),
    "tp-ddp": ("tp=2,dp_replicate=2", 4),
    "tp-fsdp": ("tp=2,dp_shard=2", 4),
    "pp": ("pp=2", 2),
    "pp-fsdp": ("pp=2,dp_shard=2", 4),
    "pp-tp": ("pp=2,tp=2", 4),
    "pp-optimizer": ("pp=2,dp_shard=2,sharding=optimizer", 4),
    "grad_op": ("fsdp,sharding=grad_op", 2),
    "none": ("fsdp,sharding=none", 2),
    "cp-tp": ("cp=2,tp=2", 4),
    "pp-cp": ("pp=2,cp=2", 4),
    "data_parallel": ("data_parallel", 1),
    "cp": ("cp=2", 2),
    "cp-fsdp": ("cp=2,dp_shard=2", 4),
    "placement": ("placement", 1),
    "placement-ddp": ("placement,dp_replicate=2", 2),
}
# Beside each with one device; those with experts are in test_expert_laws.py.
BOTH_WAYS = (
    ("ddp", "tp"),
    ("fsdp", "tp-fsdp"),
    ("hsdp", "tp-ddp"),
    ("pp", "tp"),
    ("pp-fsdp", "hsdp"),
    ("cp-fsdp", "tp-fsdp"),
)
PAIRS = [
    *((name, "single") for name in LAYOUTS),
    *(("single", name) for name in LAYOUTS if name != "single"),
    *BOTH_WAYS,
    *((other, one) for one, other in BOTH_WAYS),
    ("tp", "tp-fsdp"),
    ("optimizer", "fsdp"),
    ("tp-fsdp", "optimizer"),
    ("tp", "pp-fsdp"),
    ("pp-tp", "pp-fsdp"),
    ("placement-ddp", "fsdp"),
]
# With what a transformer has not: running statistics, a shared weight, and frozen parts without optimizer state.
KINDS = ("batchnorm", "tied", "frozen")
OF_KINDS = [(*pair, kind) for pair in (("fsdp", "tp-fsdp"), ("pp-fsdp", "hsdp")) for kind in KINDS]
SMALL = ("train.global_batch=10", "optimizer.lr=0.01")


@pytest.mark.sample(12)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_one_layout_loads_what_another_saved(pool: Pools, tmp_path: Path, one: str, other: str) -> None:
    both = [(config_of(layout, *SMALL), size) for layout, size in (LAYOUTS[one], LAYOUTS[other])]
    exchanged = check_exchange(pool, tmp_path, Tiny(kind="transformer"), both[0], both[1], steps=2)
    assert len(exchanged) > 60


@pytest.mark.sample(6)
@pytest.mark.parametrize(("one", "other", "kind"), OF_KINDS)
def test_other_kinds_of_models_too_both_ways(pool: Pools, tmp_path: Path, one: str, other: str, kind: str) -> None:
    # A pipeline wants micro-batches of one shape.
    words = ("train.global_batch=8", "train.micro_steps=2", "optimizer.lr=0.01")
    both = [(config_of(layout, *words), size) for layout, size in (LAYOUTS[one], LAYOUTS[other])]
    for exchanged in check_round_trip(pool, tmp_path, Tiny(kind=kind), both[0], both[1], steps=2):
        names = {name for name in exchanged if not name.startswith("optimizer.")}
        moments = {name.removeprefix("optimizer.exp_avg.") for name in exchanged.keys() - names if ".exp_avg." in name}
        held = initial_model(Tiny(kind=kind))
        assert names == {*dict(held.named_parameters(remove_duplicate=False)), *dict(held.named_buffers())}
        assert moments == {name for name, parameter in held.named_parameters() if parameter.requires_grad}
        for name, buffer in held.named_buffers():
            frozen = name.startswith("blocks.9.")  # its BatchNorm is in evaluation mode
            assert torch.equal(exchanged[name], buffer.to(exchanged[name].dtype)) == frozen, name


SCHEDULES = ("gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")
PASSED_ON = ("train.global_batch=24", "train.micro_steps=4", "optimizer.lr=0.01")
ONES = [one if one == "interleaved" else pytest.param(one, marks=pytest.mark.full) for one in SCHEDULES]


@pytest.mark.parametrize("schedule", ONES)
def test_stages_of_every_schedule_to_and_from_one_device(pool: Pools, tmp_path: Path, schedule: str) -> None:
    """Some give each process two stages, which do not lie next to each other."""
    single, piped = (
        (config_of(layout, *PASSED_ON), size) for layout, size in (("single", 1), (f"pp=2,schedule={schedule}", 2))
    )
    for exchanged in check_round_trip(pool, tmp_path, Sentence(kind="transformer"), single, piped, steps=2):
        assert len(exchanged) > 60


def test_experts_from_one_device_and_to_it(pool: Pools, tmp_path: Path) -> None:
    single, cut = (config_of("single", *SMALL), 1), (config_of("dp_shard=2,ep=2", *SMALL), 2)
    for exchanged in check_round_trip(pool, tmp_path, Tiny(kind="moe"), single, cut, steps=2):
        assert len(exchanged) > 60


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_every_layout_of_the_matrix_to_and_from_one_device(pool: Pools, tmp_path: Path, name: str) -> None:
    row, model = ROWS[name], "moe" if ROWS[name].resolved.ep > 1 else "transformer"
    run = runs(row)[0]
    laid = config(Case(name, model, *run)), row.world_size
    single = config(Case("singlex1", model, *run)), 1
    for exchanged in check_round_trip(pool, tmp_path, task_of(model), single, laid, steps=2):
        assert len(exchanged) > 20
