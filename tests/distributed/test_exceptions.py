"""Law 4's exceptions: what computes something else by design, beside its own simulation in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import default_collate

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.restore import read_whole
from allranks.data.cut import Cut
from allranks.training.load import load
from allranks.training.validate import validate
from allranks.verifying.parity import RecordedStep, compare, record_run
from allranks.verifying.reference import Buffers, ReferenceStep, rankwise_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, parts_of, processes_of, session_of, step_through
from tests.distributed.tasks import IGNORED, WIDTH, Convolved, Points, Tiny
from tests.training.snapshots import contents_of, find, saver_of

pytestmark = pytest.mark.distributed

STEPS, SIZE = 3, 4
# Of 9 samples in 3 micro-steps over 4 ranks one rank has none, another one each time.
CUT = Cut(global_batch=9, num_ranks=SIZE, micro_steps=3)
OVERRIDES = (*SGD, "train.global_batch=9", "train.micro_steps=3")


class Remembering(Tiny):
    """Every BatchNorm keeps running statistics, so that an evaluation looks at no batch."""

    def model(self) -> nn.Module:
        model = Convolved()
        model.blocks[8] = nn.BatchNorm2d(WIDTH)
        return model


TASK = Remembering(kind="batchnorm")


class Normed(Tiny):
    """A layer under spectral norm, whose `u` and `v` every forward moves and reads."""

    def model(self) -> nn.Module:
        model = super().model()
        spectral_norm(model.get_submodule("2"))
        return model


def recorded(layout: str, task: Tiny = TASK) -> list[RecordedStep]:
    config = config_of(layout, *OVERRIDES, steps=STEPS)
    return record_run(task, config, processes_of(config), STEPS)


def at_the_end(layout: str) -> tuple[Buffers, dict[str, float], bool]:
    """This rank's buffers, an evaluation, and whether that has left them as they were."""
    session = session_of(TASK, config_of(layout, *OVERRIDES))
    list(step_through(session, STEPS))
    before = parts_of(session)
    measured = validate(session)
    buffers = {name: part for name, (_, _, part) in before.items() if "running" in name or "num_batches" in name}
    return buffers, measured, all(torch.equal(parts_of(session)[name][2], before[name][2]) for name in buffers)


def simulated(ranks: list[list[RecordedStep]], task: Tiny = TASK) -> tuple[list[ReferenceStep], list[Buffers]]:
    """What one process computes that plays all ranks in turn, from the very samples that they fed."""
    steps = []
    for step in range(STEPS):
        fed = [iter(rank[step].samples) for rank in ranks]
        spans = [CUT.spans(CUT.global_batch, rank) for rank in range(SIZE)]
        micro_steps = [
            [batch_of([next(fed[rank]) for _ in range(spans[rank][at][1])]) for rank in range(SIZE)] for at in range(3)
        ]
        real = [batch for micro_step in micro_steps for batch in micro_step if batch is not None]
        steps.append((micro_steps, sum(int((batch["y"] != IGNORED).sum()) for batch in real)))
        assert len(real) < 3 * SIZE
    return rankwise_loop(
        initial_model(task).double(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        steps,
        lambda model, batch: task.loss(model(batch["x"]), batch),
        SIZE,
    )


def batch_of(samples: list[int]) -> Any:
    if not samples:
        return None
    batch = default_collate([Points()[sample] for sample in samples])
    return batch | {"x": batch["x"].double()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", ["local", "broadcast"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_batchnorm_is_what_its_simulation_computes(pool: Pools, layout: str, mode: str) -> None:
    layout = f"{layout},batchnorm={mode}"
    ranks = pool(SIZE).run(recorded, layout)
    reference, buffers = simulated(ranks)
    assert not compare(ranks, reference)
    synchronised = pool(SIZE).run(recorded, layout.replace(mode, "sync"))
    assert compare(synchronised, reference), "the test could not tell it from the default"
    found = pool(SIZE).run(at_the_end, layout)
    for rank, (own, _, unchanged) in enumerate(found):
        expected = buffers[rank if mode == "local" else 0]
        assert own.keys() == {name for name in expected} and unchanged
        for name, value in expected.items():
            torch.testing.assert_close(own[name], value, rtol=1e-12, atol=1e-14)
    model = initial_model(TASK).double().eval()
    model.load_state_dict(reference[-1].parameters | averaged(buffers if mode == "local" else buffers[:1]))
    with torch.no_grad():
        whole = batch_of(list(range(len(Points()))))
        loss = float(TASK.loss(model(whole["x"]), whole)) / int((whole["y"] != IGNORED).sum())
    assert [measured["loss"] for _, measured, _ in found] == pytest.approx([loss] * SIZE, rel=1e-12)


def test_spectral_norm_moves_with_samples_only(pool: Pools) -> None:
    """A filler leaves no trace in its buffers: that rank's power iteration is one step behind the others'."""
    ranks = pool(SIZE).run(recorded, "ddp", task := Normed())
    reference, buffers = simulated(ranks, task)
    assert not compare(ranks, reference)
    assert len({tuple(own["2.parametrizations.weight.0._u"].tolist()) for own in buffers}) > 1


def averaged(buffers: list[Buffers]) -> Buffers:
    stacks = {name: torch.stack([own[name] for own in buffers]) for name in buffers[0]}
    return {name: s.mean(0) if s.is_floating_point() else s.amax(0) for name, s in stacks.items()}


def save(directory: Path, layout: str) -> Buffers:
    session, contents = contents_of(TASK, config_of(layout, *OVERRIDES), STEPS)
    saver_of(session, contents, directory).save(STEPS)
    return {name: part for name, (_, _, part) in parts_of(session).items() if "running" in name}


def restored(directory: Path, layout: str) -> tuple[Buffers, list[str]]:
    session, contents = contents_of(TASK, config_of(layout, *OVERRIDES), 0)
    decisions = [str(decision) for decision in contents.load(find(directory, session))]
    return {name: part for name, (_, _, part) in parts_of(session).items() if "running" in name}, decisions


def test_a_checkpoint_keeps_what_each_rank_has_learnt(pool: Pools, tmp_path: Path) -> None:
    saved = pool(SIZE).run(save, tmp_path, "ddp,batchnorm=local")
    mean = averaged(saved)
    assert not torch.equal(saved[0]["blocks.1.running_mean"], saved[1]["blocks.1.running_mean"])
    for layout in ("ddp,batchnorm=local", "dp_replicate=2,dp_shard=2,batchnorm=local"):
        for own, (found, said) in zip(saved, pool(SIZE).run(restored, tmp_path, layout), strict=True):
            assert said == [] and all(torch.equal(found[name], own[name]) for name in own)
    what = "running batch statistics go on from the mean over the ranks"
    said_then = [f"{what}, because 4 data-parallel ranks have saved their own"]
    for layout, size in (("ddp,batchnorm=local", 2), ("fsdp", 4), ("single", 1), ("tp=2,dp_replicate=2", 4)):
        for found, said in pool(size).run(restored, tmp_path, layout):
            assert said == said_then
            for name, value in mean.items():
                torch.testing.assert_close(found[name], value, rtol=1e-15, atol=0)


def resumed(directory: Path, layout: str) -> bool:
    """In a worker: whether a resumed session ends bit by bit where the uninterrupted one does."""
    session, contents = contents_of(TASK, config_of(layout, *OVERRIDES, steps=2 * STEPS), STEPS)
    saver_of(session, contents, directory).save(STEPS)
    list(step_through(session, STEPS))
    again, contents = contents_of(TASK, config_of(layout, *OVERRIDES, steps=2 * STEPS), 0)
    contents.load(find(directory, again))
    list(step_through(again, STEPS))
    whole, parts = parts_of(session), parts_of(again)
    return all(torch.equal(whole[name][2], parts[name][2]) for name in whole)


@pytest.mark.sample(6)
@pytest.mark.parametrize("mode", ["sync", "local", "broadcast"])
@pytest.mark.parametrize("layout", ["ddp", "dp_replicate=2,dp_shard=2"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(pool: Pools, tmp_path: Path, layout: str, mode: str) -> None:
    assert pool(SIZE).run(resumed, tmp_path, f"{layout},batchnorm={mode}") == [True] * SIZE


def test_one_that_was_saved_as_one_is_everybodys(pool: Pools, tmp_path: Path) -> None:
    saved = pool(2).run(save, tmp_path, "ddp")[0]
    for found, said in pool(SIZE).run(restored, tmp_path, "ddp,batchnorm=local"):
        assert said == [] and all(torch.equal(found[name], saved[name]) for name in saved)


def test_the_trained_model_has_the_mean(pool: Pools, tmp_path: Path) -> None:
    mean = averaged(pool(SIZE).run(save, tmp_path, "ddp,batchnorm=local"))
    (path,) = tmp_path.glob("step-*")
    model: Any = load(path, TASK)
    checkpoint = Checkpoint.open(path)
    whole = read_whole(checkpoint)
    for name, value in mean.items():
        torch.testing.assert_close(model.get_buffer(name), value, rtol=1e-15, atol=0)
        torch.testing.assert_close(whole[name], value, rtol=1e-15, atol=0)
    assert not any("@" in name for name in whole)
    assert {f"model.blocks.1.running_mean@dp{rank}" for rank in range(SIZE)} <= checkpoint.manifest.tensors.keys()
