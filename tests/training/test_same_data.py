"""The data of a resume is that of the run, and that of every rank; else one line names the first sample."""

from pathlib import Path

import numpy as np
import pytest

from allranks.data.cut import Cut
from allranks.data.fingerprint import UNREADABLE
from allranks.data.stream import DataStream
from allranks.errors import CheckpointError
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, events, losses, manifest, saved, start, train, train_outside

ORDER = DataStream(range(47), cut=Cut(1), seed=0).samples_at(np.arange(47)).tolist()
OFTEN = ("train.steps=4", "checkpoint.every=2")


def write(file: Path, *changed: int) -> str:
    """A file of 47 samples, of which these are others."""
    rows = np.random.default_rng(1).standard_normal((47, 2)).astype(np.float32)
    rows[list(changed)] += 1.0
    np.save(file, rows)
    return f"task.file={file}"


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run of which four steps are made, from tmp_path/data.npy."""
    run = tmp_path / "run"
    assert start("FromFile", run, *OFTEN, write(tmp_path / "data.npy")) == 0
    assert len(manifest(run, 4)["state"]["dataset"]["fingerprint"]) == 16
    return run


def test_the_same_data_is_gone_on_with(begun: Path) -> None:
    assert train(None, "train.steps=6", resume=begun) == 0
    assert not events(begun, "verdict") and len(losses(begun)) == 6


def test_under_another_seed_samples_that_draw_are_others(begun: Path, tmp_path: Path) -> None:
    write(tmp_path / "data.npy", *range(47))
    assert train(None, "train.steps=6", "train.seed=5", resume=begun, change=("train.seed",)) == 0


def test_other_data_is_refused_with_the_first_sample_that_differs(begun: Path, tmp_path: Path) -> None:
    first, second, unseen = ORDER[3], ORDER[9], ORDER[30]
    write(tmp_path / "data.npy", second, first, unseen)
    words = rf"dataset\('train'\)\[{first}\] is another sample than when step-00000004 was written, 2 of 16 that were"
    with pytest.raises(CheckpointError, match=words) as told:
        train(None, "train.steps=6", resume=begun)
    assert told.value.exit_code == 78 and len(losses(begun)) == 4 and "\n" not in str(told.value)
    write(tmp_path / "data.npy", unseen)
    assert train(None, "train.steps=5", resume=begun) == 0, "it was not looked at"


def test_a_sample_that_cannot_be_read_any_more_is_named_with_why(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {str(ORDER[0]): f"{UNREADABLE}OSError: [Errno 5] Input/output error"}
    monkeypatch.setattr("allranks.training.same_data.take_fingerprint", lambda stream: lost)
    words = (
        rf"\[{ORDER[0]}\] cannot be read \(OSError: \[Errno 5\] Input/output error\), other than when step-00000004 was"
    )
    with pytest.raises(CheckpointError, match=words):
        train(None, "train.steps=6", resume=begun)


def test_another_length_is_told_as_that(begun: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.zeros((46, 2), np.float32))
    with pytest.raises(CheckpointError, match="has 46 samples, but had 47"):
        train(None, "train.steps=6", resume=begun)


@pytest.mark.parametrize(("follows", "told"), [("warn", 1), ("off", 0)])
def test_who_says_so_goes_on_with_other_data(begun: Path, tmp_path: Path, follows: str, told: int) -> None:
    write(tmp_path / "data.npy", ORDER[3])
    assert train(None, "train.steps=6", f"guard.data={follows}", resume=begun) == 0
    found = [event["what"] for event in events(begun, "verdict")]
    assert len(found) == told and all(f"[{ORDER[3]}] is another sample" in what for what in found)
    kept = manifest(begun, 6)["state"]["dataset"]
    assert ("fingerprint" in kept) == (follows == "warn")
    assert train(None, "train.steps=7", "guard.data=stop", resume=begun) == 0, "from here on this is the data"


def test_samples_that_are_others_each_time_are_compared_with_nothing(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(1000))
    monkeypatch.setattr("allranks.training.same_data.digest_at", lambda stream, number: str(next(count)))
    monkeypatch.setattr("allranks.training.same_data.take_fingerprint", lambda stream: {str(ORDER[0]): "another"})
    assert train(None, "train.steps=6", resume=begun) == 0
    said = [event["what"] for event in events(begun, "decision")]
    assert "samples are not compared with other ranks' or earlier ones" in said
    assert "fingerprint" not in manifest(begun, 6)["state"]["dataset"]


@pytest.mark.distributed
def test_a_host_with_other_data_is_named_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(tmp_path / "other.npy", ORDER[5])
    words = (*QUICK, *OFTEN, write(tmp_path / "data.npy"), f"task.other={tmp_path / 'other.npy'}")
    first, second = train_outside(pool, 2, "FromFile", *words, run=run, layout="ddp")
    assert first == second and str(first).startswith(
        f"DataError: dataset('train')[{ORDER[5]}] is another sample on rank 1 ("
    )
    assert ") than on rank 0, 1 of 16 that were looked at: every process has to see the same data" in str(first)
    assert saved(run) == []
