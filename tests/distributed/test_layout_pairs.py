"""A checkpoint of one layout loads under any other: every tensor bit by bit, and proven by its digest."""

from pathlib import Path

import pytest

from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of
from tests.distributed.tasks import Tiny
from tests.training.snapshots import check_exchange

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
    "cp": ("cp=2", 2),
    "cp-fsdp": ("cp=2,dp_shard=2", 4),
    "placement": ("placement", 1),
    "placement-ddp": ("placement,dp_replicate=2", 2),
}
PAIRS = [
    *((name, "single") for name in LAYOUTS),
    *(("single", name) for name in LAYOUTS if name != "single"),
    ("ddp", "tp"),
    ("fsdp", "tp-fsdp"),
    ("hsdp", "tp-ddp"),
    ("tp", "tp-fsdp"),
    ("tp-fsdp", "fsdp"),
    ("tp-ddp", "hsdp"),
    ("optimizer", "fsdp"),
    ("tp-fsdp", "optimizer"),
    ("pp", "tp"),
    ("tp", "pp-fsdp"),
    ("pp-fsdp", "hsdp"),
    ("pp-tp", "pp-fsdp"),
    ("cp-fsdp", "tp-fsdp"),
    ("placement-ddp", "fsdp"),
]
SMALL = ("train.global_batch=10", "optimizer.lr=0.01")


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_one_layout_loads_what_another_saved(pool: Pools, tmp_path: Path, one: str, other: str) -> None:
    both = [(config_of(layout, *SMALL), size) for layout, size in (LAYOUTS[one], LAYOUTS[other])]
    exchanged = check_exchange(pool, tmp_path, Tiny(kind="transformer"), both[0], both[1], steps=2)
    assert len(exchanged) > 60
