"""float16 in a loop of one's own: held to torch's own scaler in one process, and to the run without a crash."""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import allranks
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.run import Run
from allranks.training.door import World
from tests.distributed.pool import Pools
from tests.distributed.scaled import (
    ADAM,
    MAX_NORM,
    SGD,
    STEPS,
    Heavy,
    check_parameters,
    check_skips,
    simulate,
    targets_of,
)
from tests.distributed.sessions import Parts, initial_model, together
from tests.distributed.tasks import TENSOR
from tests.training.own.cases import Crash, everything

LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
    "optimizer": ("dp_shard=*,sharding=optimizer", 2),
    "tp": ("tp=2", 2),
    "pp": ("pp=2", 2),
    "cp": ("cp=2", 2),
}
CUT = ("tp", "pp", "cp")
# As a Task's, in tests/distributed/test_float16_laws.py.
TOLERANCE = {"single": 0.0, "ddp": 0.0, "tp": 4e-3, "pp": 4e-3, "cp": 4e-3}
UNCLIPPED = 1e9
SCALER = {"scaler.scale", "scaler.good_steps", "scaler.skipped_steps"}
Seen = list[tuple[Parts, list[list[int]]]]


def optimizer_of(world: World, model: nn.Module, which: object) -> torch.optim.Optimizer:
    if which == SGD:
        return world.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    return world.optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.01)


def held(world: World) -> Parts:
    """This rank's parts of the model."""
    spread = world._ground.models.trained
    return {name: (entry.shape, entry.box, spread.local(name).clone()) for name, entry in spread.map.items()}


def backward(world: World, model: nn.Module, task: Heavy, batch: Any) -> None:
    """A forward, a loss in float32 and its backward, as the layout has it."""
    if world._ground.models.backward_call.startswith("world.run"):
        world.run(batch, task.loss, targets=targets_of(batch))
    else:
        output = model(batch["x"])
        assert output.dtype is torch.float32
        world.backward(task.loss(output, batch), targets=targets_of(batch))


def loop(
    folder: str,
    layout: str,
    kind: str,
    which: object,
    *,
    crash_after: int | None = None,
    max_norm: float = MAX_NORM,
    join: Mapping[str, Any] = MappingProxyType({}),
    **cutting: Any,
) -> tuple[Seen, dict[str, torch.Tensor]] | None:
    """In a worker: what it held after each step and the samples of its micro-batches; all at the end; None: a crash."""
    seen, samples, task = Seen(), list[list[int]](), Heavy(kind=kind)
    try:
        with allranks.join(layout=layout, precision="float16", run=folder, **join) as world:
            model = world.parallelize(initial_model(task), tensor=TENSOR.get(kind, {}))
            optimizer = optimizer_of(world, model, which)
            average = world.ema(model, 0.5)
            stream = world.stream(task.dataset("train"), global_batch=8, steps=STEPS, **cutting)
            world.resume(model, optimizer, stream)
            for batch in stream:
                samples.append(batch["index"].tolist() if world.weight else [])
                backward(world, model, task, batch)
                if world.step(optimizer, max_norm=max_norm):
                    parts = {entry.name: (entry.shape, entry.box, part.clone()) for entry, part in average.parts()}
                    seen.append((held(world) | parts, samples))
                    samples = []
                world.save(every=3)
                if stream.step == crash_after:
                    raise Crash
            beside = {entry.name: part.clone() for other in world._step.beside for entry, part in other.parts()}
            return seen, everything(world) | beside
    except Crash:
        return None


def journal(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 told of each step."""
    return list(Run.open(folder).steps())


@pytest.mark.sample(3)
@pytest.mark.parametrize("which", [SGD, ADAM], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_skip_together_as_torchs_scaler_does(pool: Pools, tmp_path: Path, name: str, which: object) -> None:
    layout, size = LAYOUTS[name]
    kind = "transformer" if name in CUT else "mlp"
    ranks = pool(size).run(loop, str(tmp_path), layout, kind, which, timeout=120)
    told = [steps for steps, _ in ranks]
    data_ranks = range(0, size, 2 if name in CUT else 1)
    samples = [[own for rank in data_ranks for own in told[rank][step][1]] for step in range(STEPS)]
    expected = simulate(kind, SGD if which == SGD else ADAM, samples)
    lines = journal(tmp_path)
    check_skips(lines, expected, samples)
    found = [together([steps[step][0] for steps in told]) for step in range(STEPS)]
    if which == SGD or name not in CUT:  # Adam divides noise by eps
        check_parameters(found, expected, TOLERANCE.get(name, 1e-6))
    for step in range(1, STEPS):  # what was skipped has changed nothing, the average neither
        same = all(torch.equal(value, found[step - 1][key]) for key, value in found[step].items())
        assert same == ("skipped" in lines[step])


@pytest.mark.parametrize("layout", ["ddp", "dp_shard=2"])
def test_a_step_of_several_micro_batches(pool: Pools, tmp_path: Path, layout: str) -> None:
    """The first one's targets stand for all of them in the backward, and all of them are counted in the update."""
    ranks = pool(2).run(
        partial(loop, micro_steps=2, max_norm=UNCLIPPED), str(tmp_path), layout, "mlp", SGD, timeout=120
    )
    told = [steps for steps, _ in ranks]
    samples = [[own for steps in told for own in steps[step][1]] for step in range(STEPS)]
    assert all(len(forwards) == 4 for forwards in samples)
    dataset = Heavy().dataset("train")
    counts = [[sum(targets_of(dataset[i]) for i in own) for own in forwards] for forwards in samples]
    first = [2 * (one[0] + one[2]) for one in counts]  # of both ranks
    assert first != list(map(sum, counts)), "the first ones have more targets, or fewer"
    expected = simulate("mlp", SGD, samples, first, UNCLIPPED)
    check_skips(journal(tmp_path), expected, samples)
    found = [together([steps[step][0] for steps in told]) for step in range(STEPS)]
    check_parameters(found, expected, 1e-6)  # four forwards are added up in another order


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_a_resumed_loop_goes_on_at_the_same_scale(pool: Pools, tmp_path: Path, name: str) -> None:
    layout, size = LAYOUTS[name]
    whole = pool(size).run(loop, str(tmp_path / "whole"), layout, "mlp", ADAM, timeout=120)
    folder = str(tmp_path / "crashed")
    assert pool(size).run(partial(loop, crash_after=4), folder, layout, "mlp", ADAM, timeout=120) == [None] * size
    resumed = pool(size).run(loop, folder, layout, "mlp", ADAM, timeout=120)
    for (_, one), (_, other) in zip(whole, resumed, strict=True):
        assert (
            one.keys() == other.keys() and {"scaler.scale", "scaler.good_steps", "scaler.skipped_steps"} <= one.keys()
        )
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    keys = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps", "skipped")
    lines = [[{key: line.get(key) for key in keys} for line in journal(tmp_path / run)] for run in ("whole", "crashed")]
    assert lines[0] == lines[1]
    assert journal(tmp_path / "whole")[3]["loss_scale"] < 2**16, "it was halved before the save"
    tensors = Checkpoint.open(tmp_path / "whole" / "checkpoints" / "step-00000009").manifest.tensors
    assert tensors.keys() >= SCALER


def test_another_layout_goes_on_at_the_same_scale(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert pool(2).run(partial(loop, crash_after=4), folder, "dp_shard=2", "mlp", ADAM, timeout=120) == [None] * 2
    before = journal(tmp_path)
    pool(1).run(loop, folder, "single", "mlp", ADAM, timeout=120)
    after = journal(tmp_path)
    assert len(after) == STEPS and after[3]["loss_scale"] == before[3]["loss_scale"] < 2**16
    assert after[3]["skipped_steps"] >= before[2]["skipped_steps"]


def test_a_schedule_of_torchs_does_not_mind_a_first_step_that_is_skipped(pool: Pools, tmp_path: Path) -> None:
    """It warned that it was called before optimizer.step()."""

    def case(folder: str) -> tuple[list[str], float]:
        task = Heavy()
        with allranks.join(layout="single", precision="float16", run=folder) as world:
            model = world.parallelize(initial_model(task))
            optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for batch in world.stream(task.dataset("train"), global_batch=8, steps=4):
                    world.backward(task.loss(model(batch["x"]), batch) * 100, targets=targets_of(batch))
                    if world.step(optimizer):
                        schedule.step()
            return [str(one.message) for one in caught], optimizer.param_groups[0]["lr"]

    (found,) = pool(1).run(case, str(tmp_path))
    assert "skipped" in journal(tmp_path)[0]
    assert found == ([], 0.0025)


def test_a_step_that_is_left_takes_its_count_along(pool: Pools, tmp_path: Path) -> None:
    """A step that is begun anew counts its own first micro-batch."""

    def case(folder: str, leave: bool) -> dict[str, torch.Tensor]:
        task = Heavy()
        with allranks.join(layout="ddp", precision="float16", run=folder) as world:
            model = world.parallelize(initial_model(task))
            optimizer = optimizer_of(world, model, SGD)
            stream = world.stream(task.dataset("train"), global_batch=8, micro_steps=2, steps=3)
            while stream.step < 3:
                for batch in stream:
                    targets = targets_of(batch)
                    world.backward(task.loss(model(batch["x"]), batch), targets=targets * (40 if leave else 1))
                    if leave:
                        leave = False
                        break
                    world.step(optimizer)
            return everything(world)

    whole, left = (pool(2).run(case, str(tmp_path / name), name == "left") for name in ("whole", "left"))
    for one, other in zip(whole, left, strict=True):
        assert all(torch.equal(value, other[key]) for key, value in one.items())
