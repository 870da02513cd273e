"""Parts that are other parts, and hold the same numbers."""

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny
from tests.stepping.rounds import hold_round


def shared(kind: str, layout: str, how: str) -> Any:
    """In a worker: what a round after one step finds; before it every part was made anew `how`."""
    session = session_of(Tiny(kind=kind), config_of(layout, "train.global_batch=8"))
    spread = session.spread
    for _ in step_through(session, 1):
        pass
    parts = [spread.local(name) for name, entry in spread.map.items() if entry.sharded and entry.kind == "parameter"]
    for part in parts[: 1 if how == "one" else len(parts)]:
        if how in ("alike", "one"):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(3)))
        elif how == "zero":
            part.zero_()
    verdicts = hold_round(session, 1)
    return {name: (one.kind, one.what) for name, one in verdicts.items() if name == "shards"}


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["fsdp", "tp=2"])
def test_parts_that_each_rank_made_from_one_seed_are_found(pool: Pools, layout: str) -> None:
    kind = "transformer"
    for how in ("as they are", "zero", "one"):
        assert pool(2).run(shared, kind, layout, how) == [{}, {}], how
    for found in pool(2).run(shared, kind, layout, "alike"):
        verdict_kind, what = found["shards"]
        assert verdict_kind == "shards_alike"
        assert what.startswith("after step 1 ranks 0 and 1 hold different parts of ")
        assert what.endswith(", but the same numbers")


@pytest.mark.distributed
@pytest.mark.full
def test_copies_are_no_parts(pool: Pools) -> None:
    assert pool(4).run(shared, "mlp", "dp_replicate=2,dp_shard=2", "as they are") == [{}] * 4
    assert pool(2).run(shared, "mlp", "ddp", "as they are") == [{}] * 2
    assert pool(2).run(shared, "moe", "dp_shard=2,ep=2", "as they are") == [{}] * 2
