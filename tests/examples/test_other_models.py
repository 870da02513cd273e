"""examples/contrastive, gan and recommender learn, whatever the layout."""

import math
from pathlib import Path

import pytest

import allranks
from tests.examples.commands import EXAMPLES, last, train

pytestmark = pytest.mark.distributed


def path_of(name: str) -> str:
    return str(EXAMPLES / name / "task.py")


@pytest.mark.full
def test_the_contrastive_example_compares_with_the_samples_of_all_processes(tmp_path: Path) -> None:
    """It computes on two processes what it computes on one, and finds most pairs among 128."""
    few = ("train.epochs=4", "train.precision=float64")
    folders = [tmp_path / name for name in ("one", "two")]
    losses = []
    for folder, layout in zip(folders, (("single",), ("ddp", "--nproc", "2")), strict=True):
        folder.mkdir()
        events = train(path_of("contrastive"), "--layout", *layout, *few, folder=folder)
        assert last(events, "evaluation")["metrics"]["found"] > 0.7
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.full
def test_the_gan_example_trains_both_of_its_models(tmp_path: Path) -> None:
    events = train(path_of("gan"), "--layout", "fsdp", "--nproc", "2", "train.steps=30", folder=tmp_path)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 30 and all(map(math.isfinite, losses))
    models = allranks.load(tmp_path / "run", task=path_of("gan"))
    drawn = models["generator"](models["generator"][0].weight.new_zeros(3, 16))  # type: ignore[index]
    assert tuple(drawn.shape) == (3, 64)


@pytest.mark.full
def test_the_vision_example_learns_as_on_one_device(tmp_path: Path) -> None:
    """BatchNorm over two processes: the losses are those of one."""
    few = ("train.steps=40", "train.precision=float64")
    losses = []
    for layout in (("single",), ("ddp", "--nproc", "2")):
        folder = tmp_path / layout[0]
        folder.mkdir()
        events = train(path_of("vision"), "--layout", *layout, *few, folder=folder)
        assert last(events, "evaluation")["metrics"]["accuracy"] > 0.9
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp=2", "ddp"])
def test_the_recommender_example_ranks_what_it_never_saw(tmp_path: Path, layout: str) -> None:
    events = train(path_of("recommender"), "--layout", layout, "--nproc", "2", folder=tmp_path)
    assert last(events, "evaluation")["metrics"]["ranked_right"] > 0.65
