"""A checkpoint of one layout loads under any other: every tensor bit by bit, and proven by its digest."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, config_of, parts_of, together
from tests.distributed.tasks import Tiny
from tests.training.snapshots import contents_of, find, saver_of

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


def save(directory: Path, layout: str) -> Parts:
    """In a worker: two steps, and a checkpoint."""
    session, contents = contents_of(Tiny(kind="transformer"), config_of(layout, *SMALL), 2)
    saver_of(session, contents, directory).save(2)
    return parts_of(session)


def load(directory: Path, layout: str) -> tuple[Parts, int]:
    """In a worker: what it holds after the restore, and the position."""
    session, contents = contents_of(Tiny(kind="transformer"), config_of(layout, *SMALL), 0)
    contents.load(find(directory, session))
    return parts_of(session), session.stream.position


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_one_layout_loads_what_another_saved(pool: Pools, tmp_path: Path, one: str, other: str) -> None:
    (before_layout, before_size), (after_layout, after_size) = LAYOUTS[one], LAYOUTS[other]
    before = together(pool(before_size).run(save, tmp_path, before_layout))
    ranks: list[Any] = pool(after_size).run(load, tmp_path, after_layout)
    after = together([parts for parts, _ in ranks])
    assert after.keys() == before.keys() and len(before) > 60
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [position for _, position in ranks] == [20] * after_size
