"""Pipelines through the real command: runs, resumes, what the user's code raises, and what is refused."""

from pathlib import Path

import pytest

from allranks.run import Run
from tests.commands import POINTS, PROGRAMS, allranks, steps, tensor_digests

pytestmark = pytest.mark.distributed

STACKED = str(PROGRAMS / "stacked.py")
QUICK = ("train.steps=6", "train.global_batch=12", "train.precision=float64", "optimizer.lr=0.01", "checkpoint.every=3")


def losses(directory: Path) -> list[float]:
    return [event["loss"] for _, event in sorted(steps(directory).items())]


@pytest.mark.full
def test_a_run_is_the_run_of_one_process_and_resumes_under_other_layouts(tmp_path: Path) -> None:
    ran = {
        name: allranks("train", STACKED, *QUICK, "--layout", layout, "--run", name, "--json", folder=tmp_path)
        for name, layout in {"one": "single", "two": "pp=2", "four": "pp=2,dp_shard=2,schedule=interleaved"}.items()
    }
    assert "2 stages over pp=2 begin at the model's start, layers.2, because these modules repeat" in ran["two"].stderr
    assert "the cut model computes what the whole one does" in ran["two"].stderr
    alone = losses(tmp_path / "one")
    for name in ("two", "four"):
        assert losses(tmp_path / name) == pytest.approx(alone, rel=1e-10)
        found, whole = (list(Run.open(tmp_path / one).steps())[-1]["ledger"] for one in (name, "one"))
        assert found == whole
        metrics = [
            [event["metrics"] for event in Run.open(tmp_path / one).events() if event["event"] == "evaluation"]
            for one in (name, "one")
        ]
        assert metrics[0][0] == pytest.approx(metrics[1][0], rel=1e-10)
    allranks("train", "--resume", "two", "train.steps=9", "--layout", "dp_shard=2", folder=tmp_path)
    allranks("train", "--resume", "four", "train.steps=9", "--layout", "pp=2,tp=2", folder=tmp_path)
    allranks("train", "--resume", "one", "train.steps=9", folder=tmp_path)
    for name in ("two", "four"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp=2", "pp=2,schedule=zbv"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, layout: str) -> None:
    task = POINTS if layout == "pp=2" else STACKED  # the first one drops
    common = (task, "train.global_batch=8", "--layout", layout, "train.steps=6", "schedule.steps=6")
    allranks("train", *common, "--run", "whole", folder=tmp_path)
    allranks("train", *common, "train.steps=3", "--run", "halves", folder=tmp_path)
    allranks("train", "--resume", "halves", "train.steps=6", folder=tmp_path)
    assert tensor_digests(tmp_path / "halves", 6) == tensor_digests(tmp_path / "whole", 6)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


@pytest.mark.full
def test_the_short_last_batch_of_an_epoch_goes_through_in_turn(tmp_path: Path) -> None:
    """61 samples in batches of 12: the last one has a single sample."""
    common = (STACKED, "train.global_batch=12", "train.epochs=1", "train.precision=float64")
    for name, layout in {"one": "single", "two": "pp=2", "four": "pp=2,dp_shard=2"}.items():
        allranks("train", *common, "--layout", layout, "--run", name, folder=tmp_path)
    assert len(losses(tmp_path / "one")) == 6
    for name in ("two", "four"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


@pytest.mark.full
def test_the_users_own_error_is_shown_as_it_is(tmp_path: Path) -> None:
    """It is raised in the last stage, inside torch's schedule."""
    ran = allranks(
        *("train", POINTS, "task.boom_rank=1", "train.global_batch=8", "train.steps=20", "--layout", "pp=2"),
        folder=tmp_path,
        check=1,
    )
    assert ran.stderr.count("ValueError: the user's own mistake") == 1
    assert "failed to run forward" not in ran.stderr and "points.py" in ran.stderr
    assert "After it failed rank 0: what they say is in runs/" in ran.stderr


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (2, "pp(3) = 3, but the world has 2 processes", ("--layout", "pp=3", "--nproc", "2")),
        (
            2,
            "train.micro_steps=1 does not cut 12 samples into micro-steps of one shape that schedule=1f1b takes over 2 "
            "stages: train.micro_steps can be 2, 3, 4",
            ("--layout", "pp=2", "train.micro_steps=1"),
        ),
        (
            2,
            "train.global_batch(13) over dp_replicate * dp_shard(2) leaves 1: train.global_batch=12 or 14 fits",
            ("--layout", "pp=2,dp_replicate=2", "train.global_batch=13"),
        ),
        (
            2,
            "pp=2 needs at least 2 micro-steps of one shape, and train.global_batch(1) gives a data-parallel rank 1 "
            "samples: set train.global_batch=2 or a multiple of it",
            ("--layout", "pp=2", "train.global_batch=1"),
        ),
        (
            78,
            "a pipeline of 4 stages begins at 4 blocks at least, and this model has 3 (layers.0, layers.1, layers.2)",
            ("--layout", "pp=2,schedule=interleaved", "task.num_layers=3"),
        ),
        (
            78,
            "layout pp=2 does not compute what one process computes",
            ("--layout", "pp=2", "task.outside=true"),
        ),
        (
            2,
            "schedule=zbv runs the halves of a backward apart, which recompute=full cannot follow",
            ("--layout", "pp=2,schedule=zbv,recompute=full"),
        ),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, code: int, words: str, arguments: tuple[str, ...]
) -> None:
    ran = allranks("train", STACKED, *QUICK, *arguments, folder=tmp_path, check=code)
    assert words in ran.stderr and len(ran.stderr.strip().splitlines()) == 1, ran.stderr
