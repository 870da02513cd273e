"""layout.ddp_hook: what it computes is what one process computes that plays all ranks (law 4's exceptions)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from allranks.stepping.session import Session
from allranks.verifying.parity import RecordedStep, compare, record_run
from allranks.verifying.reference import ReferenceStep
from allranks.verifying.reference_replicas import Reduce, low_rank, mean, reduced_loop, rounded
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, parts_of, processes_of, step_through
from tests.distributed.tasks import IGNORED, Tiny
from tests.training.snapshots import contents_of, find, saver_of

pytestmark = pytest.mark.distributed

STEPS = 4
BATCH = ("train.global_batch=9", "train.micro_steps=2")
# Of the tiny matrices some are worth it at rank 1; one step goes whole.
POWERSGD = ("layout.ddp_hook=powersgd", "layout.powersgd_rank=1", "layout.powersgd_start=1")


def recorded(kind: str, layout: str, *overrides: str) -> list[RecordedStep]:
    config = config_of(layout, *SGD, *BATCH, *overrides, steps=STEPS)
    return record_run(Tiny(kind=kind), config, processes_of(config), STEPS)


def batch_of(task: Tiny, samples: Sequence[int]) -> Any:
    if not samples:
        return None
    batch = default_collate([task.dataset("train")[sample] for sample in samples])
    return batch | {"x": batch["x"].double() if batch["x"].is_floating_point() else batch["x"]}


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def simulated(kind: str, ranks: list[list[RecordedStep]], reduce: Reduce) -> list[ReferenceStep]:
    """From the very samples that they fed."""
    task = Tiny(kind=kind)
    steps = []
    for step in range(STEPS):
        batches = [batch_of(task, rank[step].samples) for rank in ranks]
        targets = sum(int((batch["y"] != IGNORED).sum()) for batch in batches if batch is not None)
        steps.append((batches, targets))
    return reduced_loop(
        initial_model(task).double(),
        make_sgd,
        steps,
        lambda model, batch: task.loss(model(batch["x"]), batch),
        reduce,
    )


Make = Callable[[], Reduce]
HOOKS: dict[str, tuple[tuple[str, ...], Make]] = {
    "bfloat16": (("layout.ddp_hook=bfloat16",), lambda: rounded(torch.bfloat16)),
    "float16": (("layout.ddp_hook=float16",), lambda: rounded(torch.float16)),
    "powersgd": (POWERSGD, lambda: low_rank(1, start=1)),
}
CASES = [
    ("ddp", 2, ()),
    ("ddp", 2, ("layout.static_graph=true",)),
    ("dp_shard=2,sharding=optimizer", 2, ()),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("layout", "size", "more"), CASES, ids=str)
@pytest.mark.parametrize("kind", ["mlp", "tied"])
def test_it_is_what_its_simulation_computes(
    pool: Pools, hook: str, layout: str, size: int, more: tuple[str, ...], kind: str
) -> None:
    overrides, make = HOOKS[hook]
    ranks = pool(size).run(recorded, kind, layout, *overrides, *more)
    differences = compare(ranks, simulated(kind, ranks, make()))
    assert not differences, "; ".join(map(str, differences[:5]))
    exact = simulated(kind, ranks, mean)
    assert compare(ranks, exact), "the test could not tell it from the exact mean"


# (layout, processes, one process of each share of the samples): the sum of all gradients is what counts.
EXACT_SUMS = [
    ("ddp", 4, range(4)),
    ("cp=2", 2, [0]),
    ("dp_replicate=2,cp=2", 4, [0, 2]),
    ("dp_replicate=2,dp_shard=2,sharding=optimizer", 4, range(4)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "size", "shares"), EXACT_SUMS, ids=str)
def test_powersgd_does_not_depend_on_the_number_of_ranks(
    pool: Pools, layout: str, size: int, shares: Sequence[int]
) -> None:
    ranks = pool(size).run(recorded, "transformer", layout, *POWERSGD)
    reference = simulated("transformer", [ranks[share] for share in shares], low_rank(1, start=1))
    assert len(reference[0].gradients["layers.0.attention.query.weight"]) == 48
    differences = compare(ranks, reference)
    assert not differences, "; ".join(map(str, differences[:5]))


@pytest.mark.parametrize("hook", ["bfloat16", "float16"])
def test_rounding_goes_with_tensor_parallelism(pool: Pools, hook: str) -> None:
    """Each process rounds its part: of a cut layer the same numbers, so that the simulation knows nothing of tp."""
    overrides, make = HOOKS[hook]
    ranks = pool(4).run(recorded, "transformer", "tp=2,dp_replicate=2", *overrides)
    differences = compare(ranks, simulated("transformer", [ranks[0], ranks[2]], make()))
    assert not differences, "; ".join(map(str, differences[:5]))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("layout", "size"), [("ddp", 4), ("cp=2", 2), ("dp_replicate=2,cp=2", 4)])
@pytest.mark.parametrize(("hook", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_rounding_over_more_ranks_stays_within_its_type(
    pool: Pools, hook: str, bits: int, layout: str, size: int
) -> None:
    """Beyond two ranks a sum in a lower type depends on the order of the ring."""
    ranks = pool(size).run(recorded, "transformer", layout, f"layout.ddp_hook={hook}")
    whole = pool(size).run(recorded, "transformer", layout)
    found, exact = ranks[0][0].gradients, whole[0][0].gradients
    largest = max(float(gradient.abs().max()) for _, gradient in exact.values())
    errors = [float((found[name][1] - gradient).abs().max()) for name, (_, gradient) in exact.items()]
    assert 2.0**-bits * largest / 50 < max(errors) < size * 2.0**-bits * largest


def resumed(directory: Path, layout: str, *overrides: str) -> tuple[bool, list[str]]:
    """In a worker: whether a resumed session ends bit by bit where the uninterrupted one does."""
    config = config_of(layout, *SGD, *BATCH, *overrides, steps=2 * STEPS)
    session, contents = contents_of(Tiny(kind="tied"), config, STEPS)
    saver_of(session, contents, directory).save(STEPS)
    list(step_through(session, STEPS))
    again, contents = contents_of(Tiny(kind="tied"), config, 0)
    decisions = contents.load(find(directory, again))
    list(step_through(again, STEPS))
    ours, theirs = everything(session), everything(again)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours), [str(decision) for decision in decisions]


def everything(session: Session) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, and what the hook keeps, of this rank."""
    assert session.spread.hook is not None
    kept = {entry.name: part for entry, part in session.spread.hook.parts(session.spread.map)}
    return kept | {name: part for name, (_, _, part) in parts_of(session).items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(pool: Pools, tmp_path: Path, hook: str, size: int) -> None:
    assert pool(size).run(resumed, tmp_path, "ddp", *HOOKS[hook][0]) == [(True, [])] * size


def saved(directory: Path, layout: str, *overrides: str) -> None:
    config = config_of(layout, *SGD, *BATCH, *overrides, steps=2 * STEPS)
    session, contents = contents_of(Tiny(kind="tied"), config, STEPS)
    saver_of(session, contents, directory).save(STEPS)


def gone_on(directory: Path, layout: str, *overrides: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """In a worker: the parameters after the steps that were left, and what was said of the resume."""
    config = config_of(layout, *SGD, *BATCH, *overrides, steps=2 * STEPS)
    session, contents = contents_of(Tiny(kind="tied"), config, 0)
    decisions = contents.load(find(directory, session))
    list(step_through(session, STEPS))
    return {name: session.spread.local(name) for name in session.spread.map}, [str(d) for d in decisions]


def test_another_number_of_ranks_goes_on_from_the_mean_of_what_was_not_sent(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(saved, tmp_path, "ddp", *POWERSGD)
    (alike, _), _ = pool(2).run(gone_on, tmp_path, "ddp", *POWERSGD)
    for found, said in pool(3).run(gone_on, tmp_path, "ddp", *POWERSGD):
        assert said == ["powersgd_error go on from the mean, because 2 have saved their own, and others go on"]
        for name, value in alike.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.full
def test_a_run_may_begin_and_end_with_it(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(saved, tmp_path / "whole", "ddp")
    said = pool(2).run(gone_on, tmp_path / "whole", "ddp", *POWERSGD)[0][1]
    assert said == ["powersgd_error, powersgd_q begin anew, because the checkpoint has none that fit"]
    pool(2).run(saved, tmp_path / "low", "ddp", *POWERSGD)
    for layout in ("ddp", "fsdp"):
        said = pool(2).run(gone_on, tmp_path / "low", layout)[0][1]
        why = "because this layout has no use for them"
        assert said == [f"powersgd_error, powersgd_q of the checkpoint are left out, {why}"]
    other = ("layout.ddp_hook=powersgd", "layout.powersgd_rank=2", "layout.powersgd_start=1")
    said = pool(2).run(gone_on, tmp_path / "low", "ddp", *other)[0][1]
    assert all("begin anew" in line or "left out" in line for line in said), said
