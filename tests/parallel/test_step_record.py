"""What a record says of a step is what the step did: order by unit, and bytes counted beside it."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from allranks.parallel.step_record import Deed
from allranks.training.sharding import record_step
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny

SMALL = ("train.global_batch=8", "optimizer.name=sgd", "optimizer.lr=0.01")
AROUND = ("the rest", "layers.0", "layers.1", "the rest")
TRAVELS = ("gather", "reduce-scatter", "all-reduce", "broadcast")


def record(layout: str, kind: str, *overrides: str) -> tuple[list[Deed], Counter[str], dict[str, int], int]:
    """In a worker: the deeds, the bytes that torch.distributed was asked to bring this rank, and each unit's bytes."""
    session = session_of(Tiny(kind=kind), config_of(layout, *SMALL, *overrides, precision="float32"))
    counted: Counter[str] = Counter()
    rank_of, size_of = dist.get_rank, dist.get_world_size
    broadcast: Any = dist.broadcast
    exchange: Any = dist.all_to_all_single
    reduce: Any = dist.all_reduce
    ignored = session.processes.agreement

    def count_broadcast(tensor: Any, *args: Any, group: Any = None, group_src: Any = None, **kwargs: Any) -> Any:
        counted["broadcast"] += tensor.nbytes * (group_src != rank_of(group))
        return broadcast(tensor, *args, group=group, group_src=group_src, **kwargs)

    def count_exchange(output: Any, given: Any, splits: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        own = output.numel() // size_of(group) if splits is None else splits[rank_of(group)]
        counted["exchange"] += (output.numel() - own) * output.element_size()
        return exchange(output, given, splits, *args, group=group, **kwargs)

    def count_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is not ignored:
            counted["reduce"] += tensor.nbytes * 2 * (size_of(group) - 1) // size_of(group)
        return reduce(tensor, *args, group=group, **kwargs)

    run, steps = session.step.run, list[Any]()

    def only_the_last(*args: Any) -> Any:
        counted.clear()
        steps.append(None)
        return run(*args)

    units: dict[str, int] = {}
    for name, entry in session.spread.map.items():
        if entry.kind == "parameter" and entry.alias_of is None:
            local = session.spread.local(name)
            units[entry.unit or "the rest"] = units.get(entry.unit or "the rest", 0) + local.nbytes
    with (
        mock.patch.object(dist, "broadcast", count_broadcast),
        mock.patch.object(dist, "all_to_all_single", count_exchange),
        mock.patch.object(dist, "all_reduce", count_reduce),
        mock.patch.object(session.step, "run", only_the_last),
    ):
        deeds, _ = record_step(session)
    gradients = sum(parameter.nbytes for parameter in session.spread.trainable().values())
    assert len(steps) == 3
    return deeds, counted, units, gradients


def total(deeds: list[Deed], *whats: str) -> int:
    return sum(deed.num_bytes for deed in deeds if deed.what in whats)


def words(deeds: list[Deed], phase: str) -> list[str]:
    return [f"{deed.what} {deed.unit}" for deed in deeds if deed.phase == phase]


@pytest.mark.distributed
def test_full_sharding_gathers_twice_and_drops_twice(pool: Pools) -> None:
    ranks = pool(2).run(record, "fsdp", "transformer")
    for deeds, counted, units, _ in ranks:
        blocks = ("layers.0", "layers.1")
        forward = ["gather the rest", "compute the rest"]
        forward += [f"{what} {block}" for block in blocks for what in ("gather", "compute", "drop")]
        around = "compute the rest"  # the norm, the head and the loss; then the loss's backward
        assert words(deeds, "forward") == [*forward, around]
        backward = words(deeds, "backward")
        assert backward[0] == around
        for block in blocks:
            places = [backward.index(f"{what} {block}") for what in ("gather", "compute", "drop", "reduce-scatter")]
            assert places == sorted(places)
        # What the next unit needs is asked for before this one computes, which ends with its drop.
        assert backward.index("gather layers.0") < backward.index("drop layers.1")
        assert backward[-1] == "reduce-scatter the rest" and "gather the rest" not in backward
        gathered = {deed.unit: deed.num_bytes for deed in deeds if deed.what == "gather"}
        # Two ranks: each receives as much as it holds. The embedding's 11 rows are 5 here, filled up to 6.
        assert {block: gathered[block] for block in blocks} == {block: units[block] for block in blocks}
        assert units["the rest"] <= gathered["the rest"] <= units["the rest"] + 2 * 24 * 4
        assert total(deeds, "gather") == counted["broadcast"]
        assert total(deeds, "reduce-scatter") == counted["exchange"]
        assert total(deeds, "all-reduce") == counted["reduce"]


@pytest.mark.distributed
def test_other_shardings_leave_out_what_they_leave_out(pool: Pools) -> None:
    for deeds, counted, _, _ in pool(2).run(record, "fsdp,sharding=grad_op", "transformer"):
        assert not [deed for deed in deeds if deed.phase == "forward" and deed.what == "drop"]
        assert not [deed for deed in deeds if deed.phase == "backward" and deed.what == "gather"]
        assert total(deeds, "gather") == counted["broadcast"]
    for deeds, _, _, gradients in pool(2).run(record, "fsdp,sharding=none", "transformer"):
        assert total(deeds, "gather", "reduce-scatter") == 0
        assert all(deed.num_bytes for deed in deeds if deed.travels), "alone in a group a rank sends nothing"
        assert total([deed for deed in deeds if deed.phase == "backward"], "all-reduce") == pytest.approx(
            gradients, rel=0.01
        )
    for deeds, counted, _, _ in pool(4).run(record, "dp_replicate=2,dp_shard=2", "transformer", timeout=120):
        last = words(deeds, "backward")[-2:]
        assert last == ["reduce-scatter the rest", "all-reduce the rest"]
        assert total(deeds, "reduce-scatter") == counted["exchange"]
        assert total(deeds, "all-reduce") == counted["reduce"]


@pytest.mark.distributed
def test_copies_are_reduced_bucket_by_bucket(pool: Pools) -> None:
    small = "layout.ddp_bucket_mb=0.02"
    for deeds, _, _, gradients in pool(2).run(record, "ddp", "transformer", small):
        assert words(deeds, "forward") == [f"compute {unit}" for unit in AROUND]
        backward = words(deeds, "backward")
        assert [one for one in backward if one.startswith("compute")] == [f"compute {unit}" for unit in AROUND[::-1]]
        buckets = [one for one in backward if not one.startswith("compute")]
        assert buckets == [f"all-reduce bucket {index}" for index in range(1, len(buckets) + 1)] and len(buckets) > 2
        # The first one is on its way while the second block's backward is still to come, the last one comes last.
        assert backward.index(buckets[0]) < backward.index("compute layers.0") and backward[-1] == buckets[-1]
        assert total(deeds, "all-reduce") == gradients, "2 (n - 1) / n of the gradients, between two"
    for deeds, counted, _, _ in pool(2).run(record, "dp_shard=2,sharding=optimizer", "transformer"):
        assert words(deeds, "update")[-1] == "broadcast over dp_shard"
        assert total(deeds, "broadcast") == counted["broadcast"]


@pytest.mark.distributed
def test_what_tp_moves_has_the_block_that_asks_for_it(pool: Pools) -> None:
    for deeds, *_ in pool(2).run(record, "tp=2", "transformer"):
        assert [one for one in words(deeds, "forward") if one.startswith("compute")] == [
            f"compute {unit}" for unit in AROUND
        ]
        for phase in ("forward", "backward"):
            block = ""
            for deed in (one for one in deeds if one.phase == phase):
                block = deed.unit if deed.what == "compute" else block
                assert deed.what == "compute" or deed.unit == f"{block} over tp".removeprefix("the rest ")


@pytest.mark.distributed
def test_what_is_computed_again_is_told(pool: Pools) -> None:
    for deeds, *_ in pool(2).run(record, "ddp,recompute=full", "transformer"):
        backward = [one for one in words(deeds, "backward") if "compute" in one and "layers" in one]
        assert backward == [f"{what} layers.{block}" for block in (1, 0) for what in ("recompute", "compute")]
        assert not [deed for deed in deeds if deed.what == "recompute" and deed.phase != "backward"]


@pytest.mark.distributed
def test_only_the_last_micro_step_is_told(pool: Pools) -> None:
    for deeds, *_ in pool(2).run(record, "fsdp", "transformer", "train.micro_batch=2"):
        assert words(deeds, "forward").count("gather layers.0") == 1
        assert words(deeds, "backward").count("reduce-scatter layers.0") == 1
