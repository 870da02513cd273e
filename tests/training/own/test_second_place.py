"""A loop of one's own whose checkpoints are in a second place, too: brought there, and back where its own are lost."""

import shutil
from pathlib import Path

import pytest
import torch

import allranks
from allranks.checkpointing.mirror import Mirror
from allranks.errors import CheckpointError
from allranks.run import Run
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, count, loss_of, sgd


def train(folder: str, steps: int, mirror: str, keep_every: int | None = None) -> int:
    """So many steps in all, with a checkpoint of each; the step that it goes on from."""
    with allranks.join(precision="float64", run=folder, keep=1, mirror=mirror, keep_every=keep_every) as world:
        torch.manual_seed(1)
        model = world.parallelize(Net())
        optimizer = world.optimizer(model, sgd)
        stream = world.stream(Samples(), global_batch=10, steps=steps)
        begun = world.resume(model, optimizer, stream)
        for batch in stream:
            world.backward(loss_of(model, batch), targets=count(batch))
            world.step(optimizer)
            world.save()
        return begun


def mirrored(folder: Path, url: str) -> list[int]:
    return [found.step for found in Mirror(url, Run.open(folder).id).list_newest()]


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_that_has_lost_its_checkpoints_goes_on_from_the_mirror(pool: Pools, tmp_path: Path, size: int) -> None:
    folder, url = tmp_path / "run", str(tmp_path / "mirror")
    assert pool(size).run(train, str(folder), 3, url, 2) == [0] * size
    assert mirrored(folder, url) == [3, 2], "when the world is left all is there"
    shutil.rmtree(folder / "checkpoints")
    assert pool(size).run(train, str(folder), 4, url, 2) == [3] * size
    assert mirrored(folder, url) == [4, 2]


def test_a_mirror_that_refuses_is_told_of_and_the_loop_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, url = tmp_path / "run", tmp_path / "mirror"
    url.write_text("a file")
    assert train(str(folder), 3, str(url)) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if str(url) in line]
    assert said and all(line.startswith("warning: ") for line in said)
    assert len(said) == len(set(said)) == 3, "at the start, at the first checkpoint, and at the end"
    assert "the run ends, and has no copy of step-00000003 there" in said[-1]


def test_a_mirror_in_a_folder_stays_where_the_loop_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(str(tmp_path / "run"), 2, "mirror") == 0
    assert Run.open(tmp_path / "run").config().checkpoint.mirror == str(tmp_path / "mirror")
    assert mirrored(tmp_path / "run", str(tmp_path / "mirror")) == [2]


def test_where_all_is_lost_and_the_mirror_gives_none_nothing_begins_anew(tmp_path: Path) -> None:
    folder, url = tmp_path / "run", tmp_path / "mirror"
    train(str(folder), 2, str(url))
    shutil.rmtree(folder / "checkpoints")
    url.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="no checkpoint any more, and the mirror gives none"):
        train(str(folder), 3, str(url))
    (tmp_path / "away").rename(url)
    assert train(str(folder), 3, str(url)) == 2
