"""Everything that matters goes into a checkpoint and comes back, under any layout, and what was written is proven."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.config import CheckpointConfig
from allranks.errors import CheckpointError, TaskError
from allranks.stepping.schedule import Schedule
from allranks.training.snapshot import Saver, find_checkpoint, kept_schedule
from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, config_of, parts_of, processes_of, together
from tests.training.snapshots import contents_of, find, saver_of, unchanged
from tests.training.tasks import Curve, Gan, Remembering, Tied, points

# Their names are replaced below, which a type checker would only allow for names that they export.
checkpoint_module: Any = importlib.import_module("allranks.checkpointing.checkpoint")
snapshot: Any = importlib.import_module("allranks.training.snapshot")
save_module: Any = importlib.import_module("allranks.checkpointing.save")


def noting(calls: list[Any], what: Callable[[Any], Any], real: Any) -> Any:
    """`real`, and `what` of its first argument in `calls`."""

    def call(first: Any, *rest: Any, **named: Any) -> Any:
        calls.append(what(first))
        return real(first, *rest, **named)

    return call


SMALL = ("train.global_batch=10", "optimizer.lr=0.05")


def save_and_hold(directory: Path, task: Any, layout: str) -> Parts:
    """In a worker: a checkpoint after two steps, and what this rank holds."""
    session, contents = contents_of(task, config_of(layout, *SMALL), 2)
    saver_of(session, contents, directory).save(2)
    return parts_of(session)


def load_and_hold(directory: Path, task: Any, layout: str) -> tuple[Parts, int, int, list[str]]:
    """In a worker: that checkpoint under another layout: what this rank holds, the position, and what was proven."""
    proven = list[str]()
    real = snapshot.check_digests
    snapshot.check_digests = noting(proven, lambda found: found.manifest.layout, real)
    try:
        session, contents = contents_of(task, config_of(layout, *SMALL), 0)
        checkpoint, skipped = find_checkpoint(directory, "run", session.processes)
        assert checkpoint is not None and not skipped
        contents.load(checkpoint)
        return parts_of(session), session.stream.position, session.stream.step, proven
    finally:
        snapshot.check_digests = real


@pytest.mark.distributed
@pytest.mark.parametrize("task", [Curve(), Tied(width=4), Gan()], ids=lambda task: type(task).__name__)
def test_what_one_layout_saved_another_loads_and_proves(pool: Pools, tmp_path: Path, task: Any) -> None:
    before = together(pool(2).run(save_and_hold, tmp_path, task, "dp_shard=2"))
    for world_size, layout, reshaped in ((2, "fsdp", False), (3, "ddp", True), (3, "fsdp", True), (1, "single", True)):
        ranks = pool(world_size).run(load_and_hold, tmp_path, task, layout)
        after = together([parts for parts, *_ in ranks])
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert [rest for _, *rest in ranks] == [[20, 2, ["dp_shard=2"] if reshaped else []]] * world_size


def load_wrongly(directory: Path) -> str:
    """In a worker: rank 1's restored tensors are damaged on the way, as by a wrong cut."""
    real = snapshot.restore

    def restore(checkpoint: Checkpoint, parts: Any, *names: Any) -> None:
        real(checkpoint, parts, *names)
        if processes.rank == 1:
            parts[0][1].add_(1)

    snapshot.restore = restore
    try:
        session, contents = contents_of(Curve(), config_of("fsdp", *SMALL), 0)
        processes = session.processes
        checkpoint, _ = find_checkpoint(directory, "run", processes)
        assert checkpoint is not None
        contents.load(checkpoint)
    except CheckpointError as error:
        return str(error)
    finally:
        snapshot.restore = real
    return "nothing was noticed"


@pytest.mark.distributed
def test_a_reshard_that_mixes_something_up_is_refused_on_all_ranks(pool: Pools, tmp_path: Path) -> None:
    pool(1).run(save_and_hold, tmp_path, Curve(), "single")
    for message in pool(2).run(load_wrongly, tmp_path):
        assert "differ from their digests: 'model.0." in message


def test_the_first_save_is_read_back_and_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    saver, calls = saver_of(session, contents, tmp_path, keep=9), list[Path]()
    real = snapshot.check_files
    monkeypatch.setattr(snapshot, "check_files", noting(calls, lambda found: found.path, real))
    for step in (1, 2, 3):
        assert saver.save(step) == tmp_path / f"step-{step:08d}" and saver.saved_step == step
    assert calls == [tmp_path / "step-00000001"]


def test_a_writer_that_writes_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    real = save_module.write_file
    monkeypatch.setattr(
        save_module, "write_file", lambda path, tensors: real(path, [(part, tensor + 1) for part, tensor in tensors])
    )
    with pytest.raises(CheckpointError, match="differ from their digests"):
        saver_of(session, contents, tmp_path).save(1)


def test_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    assert [step for step in range(9) if saver_of(session, contents, tmp_path, every=4).due(step)] == [0, 4, 8]
    assert not saver_of(session, contents, tmp_path).due(4)


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver = saver_of(session, contents, tmp_path, keep=2)
    for step in range(1, 5):
        saver.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_what_a_dead_writer_left_goes_without_a_save(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver = saver_of(session, contents, tmp_path, keep=2)
    for step in (1, 2):
        saver.save(step)
    for name in (".trash-step-00000000-ab", "step-00000003.tmp-run_1"):
        (tmp_path / name).mkdir()
    saver_of(session, contents, tmp_path, keep=1).tidy()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_what_another_run_wrote_does_not_take_the_place_of_ours(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    Saver(contents, session.processes, CheckpointConfig(keep=1), tmp_path, "another", 1).save(9)
    saver = saver_of(session, contents, tmp_path, keep=1)
    for step in (1, 2):
        saver.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000009"]


def test_what_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    told = list[str]()
    saver = Saver(contents, session.processes, CheckpointConfig(keep=1), tmp_path, "run", 1, told.append)

    def refuse(path: Path) -> None:
        raise CheckpointError(f"{path} cannot be deleted: Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "discard", refuse)
        assert [saver.save(step).name for step in (1, 2, 3)] == [f"step-{step:08d}" for step in (1, 2, 3)]
        assert len(told) == 1 and "step-00000001 cannot be deleted" in told[0] and "the run goes on" in told[0]
        saver_of(session, contents, tmp_path, keep=1).save(4)  # without anybody to tell, as in an own loop
        assert "warning: " in capsys.readouterr().err
    saver.save(5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"], "it is tried again"


class Keeping(Curve):
    """Wants to remember what no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3, "statistics": {"mean": torch.zeros(2)}}


def test_what_cannot_be_kept_is_refused_before_the_first_save(tmp_path: Path) -> None:
    session, contents = contents_of(Keeping(), config_of("single", *SMALL), 0)
    with pytest.raises(TaskError, match=r"state_dict\(\)\.statistics\.mean: a torch\.Tensor .*tolist\(\)"):
        saver_of(session, contents, tmp_path)
    other = replace(contents, task=None, extra={"mine": {1, 2}})
    with pytest.raises(TaskError, match=r"mine: a builtins\.set cannot be kept"):
        saver_of(session, other, tmp_path)


def test_what_this_run_wrote_is_not_read_again_at_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    read, real = list[str](), snapshot.verify_files
    monkeypatch.setattr(snapshot, "verify_files", noting(read, lambda found: found.path.name, real))
    before = saver_of(session, contents, tmp_path, keep=3)
    for step in (1, 2, 3):
        before.save(step)
    saver = saver_of(session, contents, tmp_path, keep=3)  # of the next attempt
    for step in (4, 5, 6):
        saver.save(step)
    assert read == ["step-00000003", "step-00000002"], "each once, however many saves it outlives"
    damaged = tmp_path / "step-00000005" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    saver.save(7)
    assert (tmp_path / "step-00000004").exists(), "it stays in the place of the one that lost a byte"


def test_what_is_no_tensor_comes_back_too(tmp_path: Path) -> None:
    config = config_of("single", *SMALL, "schedule.name=linear")
    task = Remembering()
    session, contents = contents_of(task, config, 3)
    losses = task.state_dict()["losses"]
    saver_of(session, contents, tmp_path).save(3)
    again = Remembering()
    resumed, other = contents_of(again, config, 0)
    checkpoint = find(tmp_path, resumed)
    other.load(checkpoint)
    assert again.loaded == losses > 3
    assert (resumed.stream.position, resumed.stream.step) == (30, 3)
    assert checkpoint.manifest.state["schedule"] == session.schedule.state_dict()
    assert (checkpoint.manifest.samples, checkpoint.manifest.layout) == (30, "single")


def test_a_dataset_of_another_length_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    saver_of(session, contents, tmp_path).save(1)
    grown, other = contents_of(Curve(num_points=53), config_of("single", *SMALL), 0)
    checkpoint = find(tmp_path, grown)
    with (
        unchanged(grown),
        pytest.raises(CheckpointError, match=r"has 53 samples, but had 47 .* bring the old data back, or start a new"),
    ):
        other.load(checkpoint)
    assert contents.load(checkpoint) == ()
    # One of an older version does not say how many there were.
    old = {key: value for key, value in checkpoint.manifest.state.items() if key != "dataset"}
    manifest = checkpoint.manifest.model_copy(update={"state": old})
    assert other.load(replace(checkpoint, manifest=manifest)) == ()


class Shards(IterableDataset[Any]):
    """Shards itself."""

    order = "sharded"

    def __iter__(self) -> Iterator[Any]:
        return iter(points(60, seed=1))


class Sharded(Curve):
    """On data that shards itself."""

    def dataset(self, split: str) -> Any:
        return Shards() if split == "train" else None


def save_sharded(directory: Path) -> None:
    """In a worker: a checkpoint after one step."""
    session, contents = contents_of(Sharded(), config_of("ddp", *SMALL), 1)
    saver_of(session, contents, directory).save(1)


@pytest.mark.distributed
def test_shards_on_another_number_of_ranks_are_said(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(save_sharded, tmp_path)
    session, contents = contents_of(Sharded(), config_of("single", *SMALL), 0)
    checkpoint = find(tmp_path, session)
    (decision,) = contents.load(checkpoint)
    assert str(decision).startswith("some samples may be read twice, and others never, because 2 data-parallel ranks")


def test_the_schedule_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    config = config_of("single", *SMALL, "schedule.name=linear", "schedule.warmup=2")
    session, contents = contents_of(Curve(), config, 0)
    saver_of(session, contents, tmp_path).save(0)
    checkpoint, _ = find_checkpoint(tmp_path, "run", session.processes)
    assert kept_schedule(checkpoint, config.schedule) == session.schedule == Schedule("linear", 20, 30, 0.0)
    assert kept_schedule(checkpoint, config.schedule.model_copy(update={"warmup": 3})) is None
    assert kept_schedule(None, config.schedule) is None


def test_another_model_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    saver_of(session, contents, tmp_path).save(1)
    other, wide = contents_of(Curve(width=9), config_of("single", *SMALL), 0)
    checkpoint = find(tmp_path, other)
    with (
        unchanged(other),
        pytest.raises(CheckpointError, match=r"'model\.0\.weight' is float64\[6, 2\] in the checkpoint"),
    ):
        wide.load(checkpoint)


def find_in_a_world(directory: Path) -> str:
    """In a worker: the step found, or the error."""
    processes = processes_of(config_of("ddp", *SMALL))
    try:
        checkpoint, skipped = find_checkpoint(directory, "run", processes)
    except CheckpointError as error:
        return str(error)
    return f"{None if checkpoint is None else checkpoint.step} {len(skipped)}"


@pytest.mark.distributed
def test_all_ranks_find_the_same_checkpoint_or_the_same_error(pool: Pools, tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    found: Sequence[str] = pool(2).run(find_in_a_world, tmp_path)
    assert found == ["None 0"] * 2
    saver = saver_of(session, contents, tmp_path)
    for step in (1, 2):
        saver.save(step)
    assert pool(2).run(find_in_a_world, tmp_path) == ["2 0"] * 2
    (tmp_path / "step-00000002" / "COMMITTED").unlink()
    assert pool(2).run(find_in_a_world, tmp_path) == ["1 1"] * 2
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    first, second = pool(2).run(find_in_a_world, tmp_path)
    assert first == second and "no good checkpoint" in first


def test_own_checkpoints_only(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver_of(session, contents, tmp_path).save(1)
    with pytest.raises(CheckpointError, match="belongs to run"):
        find_checkpoint(tmp_path, "another", replace(session.processes))
