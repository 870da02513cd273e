"""Laws 2, 6, 7, 8 and 12: order, randomness, precision, restart and ledger, on real sessions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.digest import ledger_sum
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.verifying.parity import RecordedStep, fed, record_run
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
from tests.distributed.tasks import IGNORED, Block, Points, Stack, Tiny, mlp, vector_gain

pytestmark = pytest.mark.distributed


def record(task: Tiny, layout: str, overrides: Sequence[str], precision: str, steps: int) -> list[RecordedStep]:
    config = config_of(layout, *overrides, precision=precision, steps=steps)
    return record_run(task, config, processes_of(config), steps)


# law 2


def test_every_layout_feeds_the_same_samples_in_the_same_steps(pool: Pools) -> None:
    """7 does not divide into 61: the second epoch begins in the middle of a step."""
    found = []
    for layout, data_ranks, world_size, cut in (
        ("single", (0,), 1, "train.micro_batch=2"),
        ("ddp", (0, 1, 2), 3, "train.micro_batch=1"),
        ("dp_replicate=2,dp_shard=2", (0, 1, 2, 3), 4, "train.micro_steps=3"),
        ("dp_replicate=2,tp=2", (0, 2), 4, "train.micro_steps=2"),
        ("dp_replicate=2,cp=2", (0, 2), 4, "train.micro_steps=2"),
    ):
        overrides = ("train.global_batch=7", "train.seed=5", cut)
        ranks = pool(world_size).run(record, Tiny(kind="tied"), layout, overrides, "float32", 9)
        found.append([fed(ranks, step, data_ranks) for step in range(9)])
    assert all(other == found[0] for other in found)
    assert [position for step in found[0] for position in step] == list(range(63))
    samples = [sample for step in found[0] for sample in step.values()]
    assert sorted(samples[:61]) == list(range(61))
    assert samples[:61] != sorted(samples[:61])


def count_forwards() -> tuple[int, int, list[int], int]:
    config = config_of("fsdp", "train.global_batch=5", "train.micro_steps=3")
    session = session_of(Tiny(kind="counted"), config)
    micro_steps = [m for stepped in step_through(session, 3) for m in stepped.batch.micro_steps]
    local = session.spread.local
    real = [m for m in micro_steps if m.weight]
    return len(micro_steps), int(local("calls")), local("seen").tolist(), sum(len(m.positions) for m in real)


def test_every_rank_runs_as_many_forwards_and_fillers_leave_no_trace(pool: Pools) -> None:
    ranks = pool(4).run(count_forwards)
    assert [micro_steps for micro_steps, *_ in ranks] == [9] * 4
    assert sum(calls for _, calls, _, _ in ranks) == 15 < 36
    assert all(seen == [samples, samples] for _, _, seen, samples in ranks)


# law 6


class Dropping(Tiny):
    """Dropout over samples that are all the same: losses differ by their masks alone."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), mlp())

    def dataset(self, split: str) -> Any:
        return [{"x": torch.ones(5), "y": 1}] * 24


class LossesOnly(Passes):
    """Keeps this rank's own losses."""

    def __init__(self, inner: Passes) -> None:
        self.inner = inner
        self.losses: list[float] = []

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        for sums in self.inner.run(batch, scale):
            self.losses.append(float(sums.loss))
            yield sums


def losses_here(layout: str, lr: float) -> tuple[list[float], Any]:
    watched: list[LossesOnly] = []

    def watch(passes: Passes) -> Passes:
        watched.append(LossesOnly(passes))
        return watched[0]

    config = config_of(layout, "optimizer.name=sgd", f"optimizer.lr={lr}", "train.global_batch=4")
    torch.rand(torch.distributed.get_rank() + 1)  # the state that is found does not matter
    session = session_of(Dropping(), config, observe=watch)
    list(step_through(session, 3))
    return watched[0].losses, parts_of(session)


def test_masks_differ_by_rank_and_step_and_are_the_same_again(pool: Pools) -> None:
    for layout in ("ddp", "fsdp"):
        first, second = (pool(2).run(losses_here, layout, 0.1) for _ in range(2))
        assert [losses for losses, _ in first] == [losses for losses, _ in second]
        one, other = (together([parts for _, parts in ranks]) for ranks in (first, second))
        assert all(torch.equal(one[name], other[name]) for name in one)
    # At a learning rate of nearly nothing only the mask can make a difference.
    losses = [loss for rank, _ in pool(2).run(losses_here, "ddp", 1e-30) for loss in rank]
    assert len(set(losses)) == 6


# law 7

# Measured: 0.005 of a tensor's largest gradient, 1e-7 of the loss. Matrix products round each rank's share of a
# batch by itself, and where the batch is one they round its sum.
BFLOAT16_GRADIENT, BFLOAT16_LOSS = 2**-7, 2**-9


class Sharp(nn.Module):
    """Its scale is 1 in bfloat16, and what it does with it 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack([Block(vector_gain()) for _ in range(2)])
        self.scale = nn.Parameter(torch.full((3,), 1 + 2**-9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found * ((self.scale - 1) * 2**9)


class Rounding(Tiny):
    """Tells whether weights were rounded that autocast keeps."""

    def model(self) -> nn.Module:
        return Sharp()


def autocast_loop(samples: Sequence[int], gathered: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step of a plain autocast loop over a model whose weights are as FSDP gathers them."""
    task = Rounding()
    model = initial_model(task).to(gathered)
    batch = default_collate([Points()[sample] for sample in samples])
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch["x"])
    targets = int((batch["y"] != IGNORED).sum())
    loss = task.loss(output.float(), batch) / targets
    loss.backward()
    return float(loss.detach()), {name: p.grad.float() for name, p in model.named_parameters()}


def bfloat16_step(pool: Pools, layout: str, *overrides: str) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    """The loss, the gradients and the samples of a step."""
    overrides = ("train.global_batch=24", *SGD, *overrides)
    ranks = pool(2).run(record, Rounding(), layout, overrides, "bfloat16", 1)
    shapes = {name: tuple(p.shape) for name, p in initial_model(Rounding()).named_parameters()}
    parts = [{name: (shapes[name], *part) for name, part in steps[0].gradients.items()} for steps in ranks]
    kept = [part.dtype for steps in ranks for _, part in steps[0].parameters.values()]
    assert set(kept) == {torch.float32}, "parameters are stored in float32"
    return ranks[0][0].loss, together(parts), list(fed(ranks, 0, range(2)).values())


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a part of its tensor's largest value."""
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(1e-9)) for n in expected)


def test_bfloat16_means_autocast_in_every_layout(pool: Pools) -> None:
    first = None
    for layout in ("ddp", "fsdp", "fsdp,sharding=none"):
        loss, found, samples = bfloat16_step(pool, layout)
        expected_loss, expected = autocast_loop(samples, torch.float32)
        assert loss == pytest.approx(expected_loss, rel=BFLOAT16_LOSS)
        assert error(found, expected) < BFLOAT16_GRADIENT
        # Sums of two ranks have one order: the layouts agree to the bit, because all of them reduce in float32.
        assert any(not torch.equal(g, g.bfloat16().float()) for g in found.values()), "reduced in bfloat16"
        first = first or found
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_a_gather_in_bfloat16_rounds_what_autocast_keeps(pool: Pools) -> None:
    loss, found, samples = bfloat16_step(pool, "fsdp", "layout.gather=bfloat16")
    rounded, expected = autocast_loop(samples, torch.bfloat16)
    kept, _ = autocast_loop(samples, torch.float32)
    assert abs(kept - rounded) > 0.01
    assert loss == pytest.approx(rounded, rel=BFLOAT16_LOSS)
    assert error(found, expected) < BFLOAT16_GRADIENT


def test_the_banner_says_so(pool: Pools) -> None:
    def said(layout: str, *overrides: str) -> list[str]:
        session = session_of(Rounding(), config_of(layout, "train.global_batch=24", *overrides, precision="bfloat16"))
        return [decision.what for decision in session.decisions]

    line = "parameters are rounded to bfloat16 where they are gathered"
    assert line in pool(2).run(said, "fsdp", "layout.gather=bfloat16")[0]
    assert line not in pool(2).run(said, "fsdp")[0]
    assert line not in pool(2).run(said, "ddp", "layout.gather=bfloat16")[0]


# law 8, for a session whose state is copied (checkpoints have tests of their own)


def restart(kind: str, layout: str, overrides: Sequence[str]) -> bool:
    """Whether 6 steps and 3 + 3 steps with a fresh session between end in the same bits."""
    config = config_of(layout, *overrides, precision="float32", steps=6)
    processes = processes_of(config)
    whole = session_of(Tiny(kind=kind), config, processes)
    losses = [stepped.loss for stepped in step_through(whole, 6)]
    old = session_of(Tiny(kind=kind), config, processes)
    first = [stepped.loss for stepped in step_through(old, 3)]
    new = session_of(Tiny(kind=kind), config, processes)
    new.optimizers.materialise()
    state = parts_of(old)
    new.optimizers.forget_unless(state.__contains__)
    kept = {name: new.spread.local(name) for name in new.spread.map}
    kept |= {entry.name: tensor for entry, tensor in new.optimizers.parts()}
    assert kept.keys() == state.keys()
    for name, tensor in kept.items():
        tensor.copy_(state[name][2])
    new.optimizers.load_numbers(old.optimizers.numbers())
    new.stream.load_state_dict(old.stream.state_dict())
    second = [stepped.loss for stepped in step_through(new, 3)]
    ends = [parts_of(session) for session in (whole, new)]
    same = all(torch.equal(ends[0][name][2], ends[1][name][2]) for name in ends[0])
    return same and losses == first + second


SMALL_BUCKETS = "layout.ddp_bucket_mb=0.0003"  # about two layers in one
RESTARTS = [
    ("ddp", 4, (SMALL_BUCKETS,)),
    ("ddp", 4, (SMALL_BUCKETS, "layout.static_graph=true", "train.micro_steps=3")),
    ("ddp", 2, ("layout.static_graph=true", "train.micro_steps=2")),
    ("ddp", 3, (SMALL_BUCKETS, "layout.static_graph=true")),
    ("fsdp", 3, ()),
    ("dp_replicate=2,dp_shard=2", 4, ("train.micro_steps=3",)),
    ("dp_shard=3,sharding=optimizer", 3, (SMALL_BUCKETS,)),
    ("tp=2,dp_replicate=2", 4, ("train.micro_steps=3",)),
    ("tp=2,dp_shard=2,recompute=full", 4, ()),
    ("dp_replicate=2,cp=2", 4, (SMALL_BUCKETS, "train.micro_steps=3")),
    ("dp_shard=2,cp=2", 4, ("train.micro_steps=3",)),
    ("placement", 1, ("train.micro_steps=3",)),
    ("placement,dp_replicate=3", 3, (SMALL_BUCKETS,)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("layout", "world_size", "overrides"), RESTARTS)
def test_a_restart_changes_no_bit(pool: Pools, layout: str, world_size: int, overrides: Sequence[str]) -> None:
    some = ("train.global_batch=13", "optimizer.lr=0.01", *overrides)
    assert pool(world_size).run(restart, "tied", layout, some, timeout=120) == [True] * world_size


# law 12


def skip_one(skips: bool) -> list[int]:
    """Ledgers of three steps, in the second of which rank 1 loses a sample on its way to the model."""

    def alter(batch: StepBatch) -> StepBatch:
        if not skips or batch.step != 1 or torch.distributed.get_rank() != 1:
            return batch
        (micro_step,) = batch.micro_steps
        fewer = MicroStep(
            batch={name: values[:-1] for name, values in micro_step.batch.items()},
            weight=1,
            targets=micro_step.targets,
            random_key=micro_step.random_key,
            positions=micro_step.positions[:-1],
            samples=micro_step.samples[:-1],
        )
        return replace(batch, micro_steps=(fewer,))

    session = session_of(Tiny(), config_of("ddp", "train.global_batch=9"))
    return [stepped.ledger for stepped in step_through(session, 3, alter)]


def test_the_ledger_shows_a_skipped_sample(pool: Pools) -> None:
    good, bad = (pool(2).run(skip_one, skips) for skips in (False, True))
    assert good[0] == good[1] and bad[0] == bad[1]
    stream = session_of(Tiny(), config_of("single", "train.global_batch=9")).stream
    plans = [plan.micro_plans[0] for plan in stream.steps()]
    assert good[0] == [ledger_sum(plan.positions.tolist(), plan.samples.tolist()) for plan in plans]
    assert [a == b for a, b in zip(good[0], bad[0], strict=True)] == [True, False, True]
