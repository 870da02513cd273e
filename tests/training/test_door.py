"""The second door: the listing of design.md computes what a plain loop computes, under every layout and launcher."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import allranks
from allranks.digest import ledger_sum
from allranks.errors import ConfigError, LayoutError
from allranks.verifying.parity import compare
from allranks.verifying.reference import ReferenceStep
from tests.distributed.pool import Pools
from tests.training.own_cases import batches, own_loop, plain

# World size, layout, cut. 37 samples in batches of 10 end in a step of 7; 8 over 3 ranks by one makes fillers.
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "single", {"global_batch": 10, "micro_batch": 4}),
    (2, "ddp", {"global_batch": 10}),
    (2, "ddp", {"global_batch": 10, "micro_batch": 2, "epochs": 2}),
    (3, "ddp", {"global_batch": 8, "micro_batch": 1}),
    (3, "ddp", {"global_batch": 3, "micro_steps": 2, "steps": 4}),
    (2, "dp_shard=2", {"global_batch": 10}),
    (2, "dp_shard=2", {"global_batch": 10, "micro_batch": 2}),
    (2, "dp_shard=2,sharding=grad_op", {"global_batch": 9, "micro_batch": 2}),
    (2, "dp_replicate=2,sharding=none", {"global_batch": 10, "micro_batch": 2}),
]


def plain_steps(max_norm: float | None, cutting: dict[str, Any]) -> list[ReferenceStep]:
    """The plain loop, in a process of the pool: torch's optimizers leave traces in the environment."""
    return plain(max_norm, **cutting)


@pytest.mark.parametrize(("size", "layout", "cutting"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_it_computes_what_one_device_computes(
    pool: Pools, tmp_path: Path, size: int, layout: str, cutting: dict[str, Any], max_norm: float | None
) -> None:
    ranks = pool(size).run(lambda: own_loop(str(tmp_path / "run"), layout, max_norm=max_norm, **cutting), timeout=240)
    reference = pool(1).run(plain_steps, max_norm, cutting)[0]
    assert len(ranks[0]) == len(reference) > 2
    if max_norm is not None:  # what the optimizer sees is clipped, what the reference keeps is not
        assert reference[0].norm > max_norm
        reference = [replace(step, gradients={}) for step in reference]
    assert [str(difference) for difference in compare(ranks, reference)] == []
    _, fed = batches(**cutting)
    expected = [f"{ledger_sum(positions, samples):016x}" for positions, samples in fed]
    assert [step.ledger for step in ranks[0]] == expected


def test_two_joins_at_once() -> None:
    with allranks.join() as world:
        assert (world.rank, world.local_rank, world.size, str(world.device)) == (0, 0, 1, "cpu")
        with pytest.raises(ConfigError, match="rank 0 of 1 on cpu.* already: leave that world's `with` first"):
            allranks.join()
    with allranks.join(layout="single") as world:
        assert world.size == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"layout": "dp_shard=2"}, LayoutError, r"dp_shard\(2\).* = 2, but the world has 1 process"),
        ({"layout": "ddp", "precision": "bfloat16"}, ConfigError, "float32 or float64; for bfloat16"),
        ({"layout": "dpp"}, ConfigError, "dpp"),
        ({"layout": "tp=2"}, LayoutError, "tp"),
        ({"keep": 0}, ConfigError, "checkpoint.keep"),
    ],
)
def test_a_wrong_argument_leaves_nothing_behind(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        allranks.join(**arguments)
    allranks.join().close()  # this process is free


def test_a_group_that_the_script_has_started_is_used_and_left(pool: Pools) -> None:
    import torch.distributed as dist

    def case() -> tuple[int, bool]:
        with allranks.join() as world:
            size = world.size
        return size, dist.is_initialized()

    assert pool(2).run(case) == [(2, True)] * 2


def test_a_group_of_its_own_is_ended(pool: Pools) -> None:
    import torch.distributed as dist

    def case() -> tuple[int, bool, bool]:
        with allranks.join() as world:
            inside = dist.is_initialized()
        return world.size, inside, dist.is_initialized()

    assert pool(2).run_alone(case, timeout=120) == [(2, True, False)] * 2


def test_the_seed_decides_what_is_built_next() -> None:
    import torch

    def first(seed: int) -> float:
        with allranks.join(seed=seed):
            return float(torch.rand(()))

    assert first(1) == first(1) != first(2)
