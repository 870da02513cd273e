"""Where the first number came from that was not finite: rank, module, samples."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.data.micro_step import StepBatch
from allranks.stepping.origin import Origin
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, parts_of, session_of, step_through
from tests.stepping.test_guards import CONFIG, Normed, Spoiled


def spoil_input(batch: StepBatch) -> StepBatch:
    """A nan among what the second micro-step feeds."""
    micro_step = batch.micro_steps[1]
    x = micro_step.batch["x"].clone()
    x[0, 0] = math.nan
    return replace(batch, micro_steps=(batch.micro_steps[0], replace(micro_step, batch={**micro_step.batch, "x": x})))


def search(task: Spoiled, layout: str, kind: str) -> Any:
    """In a worker: the origins of one step that the last rank has spoilt, what it fed then, and whether all stays."""
    session = session_of(task, config_of(layout, *CONFIG, "train.micro_steps=2", precision="float32"))
    mine = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    if kind == "parameter_gradient" and mine:
        parameter = next(iter(session.spread.trainable().values()))
        parameter.register_hook(lambda gradient: gradient * math.nan)
    task.spoilt = kind == "loss" and mine
    spoil = spoil_input if kind == "input" and mine else lambda batch: batch
    with session.loader() as loader:
        batch = spoil(next(loader))
        before = session.step.agree_first(batch)
        session.step.run(batch, before, lambda: None)
        kept = {name: tensor.clone() for name, (_, _, tensor) in parts_of(session).items()}
        found = session.step.find_origin(batch, before, session.processes.world_group)
        same = all(torch.equal(tensor, kept[name]) for name, (_, _, tensor) in parts_of(session).items())
    fed = batch.micro_steps[1 if kind == "input" else 0]
    clean = all(parameter.grad is None for parameter in session.spread.trainable().values())
    return found, (list(fed.positions), list(fed.samples)), same and clean


def check(ranks: list[Any], kind: str, names: set[str]) -> None:
    found, (positions, samples), _ = ranks[-1]
    assert all(same for _, _, same in ranks) and all(other == found for other, _, _ in ranks)
    assert {origin.rank for origin in found} == {len(ranks) - 1}, found
    assert (found[0].kind, found[0].positions, found[0].samples) == (kind, tuple(positions), tuple(samples))
    assert found[0].name in names


@pytest.mark.parametrize(
    ("kind", "names"),
    [("input", {""}), ("loss", {""}), ("parameter_gradient", {"blocks.0.gain", "blocks.0.norm.weight", "head.weight"})],
)
def test_alone(kind: str, names: set[str]) -> None:
    check([search(Spoiled(kind="mlp"), "single", kind)], kind, names | {"0.weight", "first.weight", "embed.weight"})


def test_running_statistics_are_as_before() -> None:
    check([search(Normed(), "single", "input")], "input", {""})


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["input", "loss"])
def test_the_rank_is_named_though_a_reduction_spreads_it(pool: Pools, layout: str, kind: str) -> None:
    check(pool(2).run(search, Spoiled(kind="mlp"), layout, kind), kind, {""})


@pytest.mark.distributed
def test_a_gradient_that_one_rank_spoils_names_the_parameter(pool: Pools) -> None:
    ranks = pool(2).run(search, Normed(), "ddp,batchnorm=local", "parameter_gradient")
    check(ranks, "parameter_gradient", {"0.weight"})


@pytest.mark.distributed
def test_through_a_pipeline(pool: Pools) -> None:
    ranks = pool(2).run(search, Spoiled(kind="mlp"), "pp=2", "loss")
    assert ranks[0][0] == ranks[1][0] and all(same for _, _, same in ranks)
    assert "loss" in {origin.kind for origin in ranks[0][0]} and all(origin.samples for origin in ranks[0][0])


def test_a_fault_that_passes_leaves_no_origin() -> None:
    task = Spoiled(kind="mlp")
    session = session_of(task, config_of("single", *CONFIG))
    for stepped in step_through(session, 1):
        batch = stepped.batch
    before = session.step.agree_first(batch)
    assert session.step.find_origin(batch, before, None) == ()


def test_shown_samples_are_few() -> None:
    many = tuple(range(40))
    assert str(Origin(0, "loss", "", "", many, many)).endswith(
        "samples 0, 1, 2, 3, 4, 5, 6, 7, ... (positions 0 to 39)"
    )
    assert str(Origin(0, "loss", "", "", (), ())).endswith("it was fed a filler")
