"""Everything that matters goes into a checkpoint and comes back, under any layout, and what was written is proven."""

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import IterableDataset

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.errors import CheckpointError, TaskError
from allranks.observing import heartbeat
from allranks.stepping.schedule import Schedule
from allranks.training.snapshot import find_checkpoint, kept_schedule
from tests.checkpointing.worlds import counted_reads
from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, config_of, parts_of, processes_of, together
from tests.training.runs import flip_a_byte
from tests.training.snapshots import contents_of, find, noting, saver_of, unchanged
from tests.training.tasks import Curve, Gan, Remembering, Tied, points

# Their names are replaced below, which a type checker would only allow for names that they export.
snapshot: Any = importlib.import_module("allranks.training.snapshot")


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

    def restore(checkpoint: Checkpoint, parts: Any, *names: Any, **how: Any) -> None:
        real(checkpoint, parts, *names, **how)
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


def test_state_that_no_checkpoint_could_hold_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, contents = contents_of(Remembering(), config_of("single", *SMALL), 0)
    monkeypatch.setattr("allranks.checkpointing.manifest.MANIFEST_BYTES_CAP", 100)
    with pytest.raises(TaskError, match=r"no checkpoint could be written: the manifest, .* a buffer of the model$"):
        saver_of(session, contents, tmp_path)


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


def find_and_load(directory: Path) -> tuple[Any, Any, int, str]:
    """In a worker: what this rank opens and reads to choose, the headers that it reads to load, the step, and what is
    said of newer ones.
    """
    session, contents = contents_of(Curve(width=8), config_of("fsdp", *SMALL), 0)
    seen = list[int]()
    with mock.patch.object(heartbeat.Heartbeat, "progress", lambda heart: seen.append(1)):
        with counted_reads() as chosen:
            checkpoint, skipped = find_checkpoint(directory, "run", session.processes)
        assert checkpoint is not None
        progress = len(seen)
        assert skipped or progress == len(chosen[1]) - 1 > 0, "each chunk that it reads, but for its header"
        with (
            counted_reads() as loaded,
            mock.patch("allranks.checkpointing.restore.read_index", lambda *_: pytest.fail("all headers are read")),
        ):
            contents.load(checkpoint)
        assert len(seen) > progress
    return chosen, [chunk for chunk in loaded[1] if chunk[1] == 0], checkpoint.step, "; ".join(skipped)


def save_two(directory: Path) -> None:
    """In a worker: checkpoints of steps 1 and 2."""
    session, contents = contents_of(Curve(width=8), config_of("dp_shard=4", *SMALL), 1)
    saver = saver_of(session, contents, directory)
    for step in (1, 2):
        saver.save(step)
        session.processes.barrier()  # as a step between them is one: rank 0 clears up behind each


def find_noting(directory: Path) -> list[str]:
    """In a worker: the names that this rank has waited for."""
    awaited: list[str] = []
    with mock.patch("allranks.training.snapshot.await_name", lambda path: awaited.append(path.name)):
        find_checkpoint(directory, "run", processes_of(config_of("ddp", *SMALL)))
    return awaited


@pytest.mark.distributed
def test_what_rank_0_has_chosen_is_waited_for_by_the_others(pool: Pools, tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver_of(session, contents, tmp_path).save(1)
    assert pool(2).run(find_noting, tmp_path) == [[], ["step-00000001"]]


@pytest.mark.distributed
def test_the_ranks_divide_a_checkpoint_to_see_whether_it_is_good(pool: Pools, tmp_path: Path) -> None:
    """Rank 0 reads no more of it than others, nobody opens all files, and damage that any finds passes it over."""
    pool(4).run(save_two, tmp_path)
    newest = Checkpoint.open(tmp_path / "step-00000002")
    chunks = [(newest.path / name, at) for name, one in newest.manifest.files.items() for at in range(len(one.chunks))]
    ranks: list[Any] = pool(4).run(find_and_load, tmp_path)
    headers = Counter(chunk for chunk in chunks if chunk[1] == 0)
    assert Counter(chunk for (_, read), *_ in ranks for chunk in read) == Counter(chunks) + headers
    assert [(step, said) for *_, step, said in ranks] == [(2, "")] * 4
    assert Counter(chunk for _, read, *_ in ranks for chunk in read) == headers, (
        "to load it each once more, by one rank"
    )
    for (opened, _), *_ in ranks:
        assert len(set(opened)) <= 3 and len(opened) <= 4, "one for its header, and two that its bytes may lie in"
    for rank in (3, 0):
        flip_a_byte(newest.path, f"rank-{rank:05d}.safetensors")
        (said,) = {(step, said) for *_, step, said in pool(4).run(find_and_load, tmp_path)}
        assert said[0] == 1 and said[1].startswith(f"{newest.path / f'rank-{rank:05d}.safetensors'}: bytes ")
    (newest.path / "rank-00002.safetensors").unlink()
    (said,) = {(step, said) for *_, step, said in pool(4).run(find_and_load, tmp_path)}
    assert said[0] == 1 and "rank-00002.safetensors: No such file" in said[1]
    flip_a_byte(tmp_path / "step-00000001", "rank-00001.safetensors")
    (refused,) = set(pool(2).run(find_in_a_world, tmp_path))
    assert refused.startswith(f"{tmp_path} holds no good checkpoint: {newest.path}") and "step-00000001" in refused


def find_beside_memory(directory: Path, memory: Path) -> list[str]:
    """In a worker: where the checkpoint lies that was found, and why newer ones are none."""
    checkpoint, skipped = find_checkpoint(directory, "run", processes_of(config_of("ddp", *SMALL)), memory)
    return [str(checkpoint and checkpoint.path), *skipped]


@pytest.mark.distributed
def test_a_damaged_copy_in_memory_gives_way_to_the_disk(pool: Pools, tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    for directory, step in ((disk, 1), (memory, 2), (disk, 3)):
        saver_of(session, contents, directory).save(step)
    one, two, three = disk / "step-00000001", memory / "step-00000002", disk / "step-00000003"
    assert pool(2).run(find_beside_memory, disk, memory) == [[str(three)]] * 2
    flip_a_byte(three)
    found, other = pool(2).run(find_beside_memory, disk, memory)
    assert found == other and found[0] == str(two) and [str(three) in reason for reason in found[1:]] == [True]
    flip_a_byte(two)
    found, other = pool(2).run(find_beside_memory, disk, memory)
    assert found == other and found[0] == str(one)
    assert [str(path) in reason for path, reason in zip((three, two), found[1:], strict=True)] == [True, True]


def test_own_checkpoints_only(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver_of(session, contents, tmp_path).save(1)
    with pytest.raises(CheckpointError, match="belongs to run"):
        find_checkpoint(tmp_path, "another", replace(session.processes))
