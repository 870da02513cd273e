"""Checkpoints on their way to a mirror: beside the training, newest first, and back where the run has lost its own."""

import shutil
import threading
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.mirror import Mirror
from allranks.errors import CheckpointError, RunError
from allranks.observing import heartbeat
from allranks.run import Run
from allranks.training.mirroring import Mirroring
from tests.checkpointing.worlds import save_alone
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, damage, events, same_run, saved, start, train, train_outside

OFTEN = ("checkpoint.every=2", "checkpoint.keep=2")


def mirrored(run: Path, url: str) -> list[int]:
    return [found.step for found in Mirror(url, Run.open(run).id).list_newest()]


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_has_lost_its_checkpoints_goes_on_from_the_mirror(tmp_path: Path, beside: bool) -> None:
    run, whole, url = tmp_path / "run", tmp_path / "whole", str(tmp_path / "mirror")
    settings = (*OFTEN, f"checkpoint.asynchronous={str(beside).lower()}")
    assert start("Curve", run, "train.steps=5", *settings, f"checkpoint.mirror={url}") == 0
    assert saved(run) == mirrored(run, url)[::-1] == [4, 5], "the newest few are there and here"
    shutil.rmtree(run / "checkpoints")
    assert train(None, "train.steps=9", resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 5 and not events(run, "verdict")
    assert start("Curve", whole, "train.steps=9", *OFTEN) == 0
    same_run(whole, run, 9)


def test_a_damaged_newest_one_is_replaced_by_the_mirrors(tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    assert start("Curve", run, "train.steps=4", *OFTEN, f"checkpoint.mirror={url}") == 0
    damage(run, 4)
    assert train(None, "train.steps=5", resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 4
    for step in (4, 5):
        damage(run, step)
    shutil.rmtree(url)
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        train(None, "train.steps=6", resume=run)


def test_where_all_is_lost_and_the_mirror_cannot_be_asked_nothing_begins_anew(tmp_path: Path) -> None:
    """Else its own checkpoints would soon replace the last ones that there are."""
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    assert start("Curve", run, "train.steps=4", *OFTEN, f"checkpoint.mirror={url}") == 0
    shutil.rmtree(run / "checkpoints")
    away = mock.patch.object(Mirror, "list_newest", side_effect=CheckpointError("cannot be listed: the line is dead"))
    with away, pytest.raises(CheckpointError, match=r"no checkpoint any more, and the mirror gives none: .*dead"):
        train(None, "train.steps=6", resume=run)
    assert mirrored(run, url) == [4, 2]
    assert train(None, "train.steps=6", resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 4


def test_a_mirror_that_could_not_be_asked_loses_nothing_to_a_run_that_goes_on(tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    assert start("Curve", run, "train.steps=6", *OFTEN, f"checkpoint.mirror={url}") == 0
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    real, asked = Mirror.list_newest, list[int]()

    def away_at_first(mirror: Mirror, *advanced: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise CheckpointError("cannot be listed: the line is dead")
        return real(mirror, *advanced)

    with mock.patch.object(Mirror, "list_newest", away_at_first):
        assert train(None, "train.steps=5", "checkpoint.every=1", "checkpoint.keep=1", resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 4 and 6 in mirrored(run, url)


def test_where_all_is_lost_and_the_mirrors_folder_is_missing_nothing_begins_anew(tmp_path: Path) -> None:
    """A file system that is not mounted says nothing: what lies on it would be replaced once it is."""
    run, url, away = tmp_path / "run", tmp_path / "mirror", tmp_path / "away"
    assert start("Curve", run, "train.steps=4", *OFTEN, f"checkpoint.mirror={url}") == 0
    shutil.rmtree(run / "checkpoints")
    url.rename(away)
    for made in (False, True):  # the place where it was mounted may be left, empty
        if made:
            url.mkdir()
        with pytest.raises(CheckpointError, match=r"no checkpoint any more, and the mirror gives none: .*mounted") as e:
            train(None, "train.steps=6", resume=run)
        assert "\n" not in str(e.value) and e.value.exit_code == 78
        assert url.exists() == made and saved(run) == []
    url.rmdir()
    away.rename(url)
    assert train(None, "train.steps=6", resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 4 and mirrored(run, str(url)) == [6, 4]


def test_a_mirror_whose_folder_is_missing_at_first_loses_nothing_to_a_run_that_goes_on(tmp_path: Path) -> None:
    run, url, away = tmp_path / "run", tmp_path / "mirror", tmp_path / "away"
    assert start("Curve", run, "train.steps=6", *OFTEN, f"checkpoint.mirror={url}") == 0
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    url.rename(away)
    real = Mirror.bring

    def mount_it(mirror: Mirror, checkpoint: Checkpoint, *rest: Any) -> None:
        if away.exists():
            away.rename(url)
        real(mirror, checkpoint, *rest)

    with mock.patch.object(Mirror, "bring", mount_it):
        assert train(None, "train.steps=5", "checkpoint.every=1", "checkpoint.keep=1", resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 4 and 6 in mirrored(run, str(url))
    (line,) = [event["what"] for event in events(run, "verdict")]
    assert str(url) in line and "not mounted" in line and "\n" not in line


@pytest.mark.distributed
def test_all_ranks_read_what_the_first_has_fetched(pool: Pools, tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    settings = (*QUICK, "train.steps=4", *OFTEN, f"checkpoint.mirror={url}")
    assert train_outside(pool, 2, "Curve", *settings, run=run, layout="fsdp") == [0, 0]
    shutil.rmtree(run / "checkpoints")
    assert train_outside(pool, 2, None, "train.steps=6", resume=run) == [0, 0]
    assert events(run, "resume")[-1]["step"] == 4 and mirrored(run, url) == [6, 4]


def test_what_a_lost_process_has_not_brought_a_resume_brings(tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    settings = ("train.steps=4", *OFTEN, f"checkpoint.mirror={url}")
    with mock.patch.object(Mirror, "bring"):  # it dies while its last one is on its way
        assert start("Curve", run, *settings) == 0
    assert saved(run) == [2, 4] and mirrored(run, url) == []
    assert train(None, resume=run) == 0
    assert mirrored(run, url) == [4], "there is no step left to do, and none that would save"
    assert train(None, resume=run) == 0
    assert mirrored(run, url) == [4]


@pytest.mark.parametrize(("reason", "code"), [("done", 0), ("terminated", 75)])
def test_it_is_told_that_all_is_saved_before_the_mirror_is_waited_for(
    tmp_path: Path, reason: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart, seen = heartbeat.Heartbeat(), list[int]()
    monkeypatch.setattr(heartbeat._Process, "heartbeat", heart)
    monkeypatch.setattr(Mirroring, "finish", lambda *_: seen.append(heart._fields[heartbeat.FINISHED]))
    if reason == "terminated":
        monkeypatch.setattr("allranks.training.trainer.Trainer._stop", lambda *_: reason)
    assert start("Curve", tmp_path / "run", "train.steps=3", f"checkpoint.mirror={tmp_path / 'mirror'}") == code
    assert seen == [1 + code]


def test_a_mirror_that_refuses_is_told_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    run, url = tmp_path / "run", tmp_path / "mirror"
    url.write_text("a file")
    assert start("Curve", run, "train.steps=6", *OFTEN, f"checkpoint.mirror={url}") == 0
    told = [event["what"] for event in events(run, "verdict")]
    assert saved(run) == [4, 6] and len(told) in (1, 2), "at the start, and at the first checkpoint"
    assert all(str(url) in line and "\n" not in line for line in told)


def test_of_those_that_wait_the_newest_alone_is_brought_and_nothing_goes_meanwhile(tmp_path: Path) -> None:
    go_on, brought = threading.Event(), list[int]()

    class Slow:
        """In place of a Mirror."""

        def bring(self, checkpoint: Checkpoint, advanced: Any) -> None:
            go_on.wait(30)
            brought.append(checkpoint.step)
            advanced()

        def prune(self, keep: int, keep_every: int | None) -> None:
            assert (keep, keep_every) == (2, None)

    slow: Any = Slow()
    mirroring = Mirroring(slow, 2, None, lambda line: None)
    first, second, third = (save_alone(tmp_path, step) for step in (100, 200, 300))
    for checkpoint in (first, second, third):
        mirroring.bring(checkpoint)
        if checkpoint is first:
            while mirroring._under_way is None:
                pass
    assert mirroring.leased() == {first.path, third.path}
    go_on.set()
    progressed = list[int]()
    mirroring.finish(lambda: progressed.append(1))
    assert brought == [100, 300] and progressed and mirroring.leased() == frozenset()
    mirroring.bring(second)
    mirroring.finish(lambda: None)
    assert brought[-1] == 200, "it begins again"


def damage_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


class Refusing:
    """In place of a Mirror: what it raises at its first calls, and what came there afterwards."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.brought = list(errors), list[int]()

    def bring(self, checkpoint: Checkpoint, advanced: Any) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.brought.append(checkpoint.step)

    def prune(self, keep: int, keep_every: int | None) -> None:
        """Nothing."""


def test_a_full_disk_that_takes_no_warning_ends_no_mirroring(tmp_path: Path) -> None:
    refusing, told = Refusing(CheckpointError("no room"), ValueError("nonsense")), list[str]()

    def warn(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            raise RunError("the journal cannot be written: No space left on device")

    mirroring = Mirroring(cast(Any, refusing), 2, None, warn)
    for step in (100, 200, 300):
        mirroring.bring(save_alone(tmp_path, step))
        mirroring.finish(lambda: None)
        assert mirroring.leased() == frozenset() and mirroring._thread is None
    assert refusing.brought == [300] and len(told) == 2, "told with the next one, and then not again"


def test_what_stays_for_ever_is_brought_however_long_it_waits_and_again_where_it_was_refused(tmp_path: Path) -> None:
    refusing = Refusing(CheckpointError("away"))
    mirroring = Mirroring(cast(Any, refusing), 2, 200, lambda line: None)
    saves = {step: save_alone(tmp_path / str(step), step) for step in (200, 300, 400, 500, 600)}
    mirroring.bring(saves[200])
    mirroring.finish(lambda: None)
    with mock.patch("allranks.training.mirroring.threading.Thread") as thread:
        thread.return_value.is_alive.return_value = True
        for step in (300, 400, 500):
            mirroring.bring(saves[step])
    assert mirroring.leased() == {saves[step].path for step in (200, 400, 500)}
    mirroring._thread = None
    mirroring.bring(saves[600])
    mirroring.finish(lambda: None)
    assert refusing.brought == [200, 400, 600]


def test_what_stays_for_ever_and_an_earlier_process_did_not_bring_is_brought_after_the_first(tmp_path: Path) -> None:
    saves = [save_alone(tmp_path, step) for step in (100, 200, 300, 400, 500)]
    damage_file(saves[3].path / "manifest.json")
    refusing = Refusing()
    mirroring = Mirroring(cast(Any, refusing), 2, 200, lambda line: None)
    for checkpoint in (saves[4], saves[0]):
        mirroring.bring(checkpoint)
        mirroring.finish(lambda: None)
    assert refusing.brought == [500, 200, 100]


def test_the_mirror_keeps_what_the_run_keeps(tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    often = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=2")
    assert start("Curve", run, "train.steps=5", *often, f"checkpoint.mirror={url}") == 0
    assert saved(run) == mirrored(run, url)[::-1] == [2, 4, 5]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_was_ended(tmp_path: Path) -> None:
    refusing = Refusing(KeyboardInterrupt())
    mirroring = Mirroring(cast(Any, refusing), 2, None, lambda line: None)
    first, second = (save_alone(tmp_path, step) for step in (100, 200))
    mirroring.bring(first)
    mirroring.finish(lambda: None)
    assert mirroring.leased() == frozenset()
    mirroring.bring(second)
    mirroring.finish(lambda: None)
    assert refusing.brought == [200]


def test_what_a_run_left_when_it_went_back_does_not_come_back(tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    settings = ("checkpoint.every=1", "checkpoint.keep=1", f"checkpoint.mirror={url}")
    assert start("Curve", run, "train.steps=2", *settings) == 0
    shutil.copytree(run / "checkpoints", tmp_path / "old")
    assert train(None, "train.steps=6", resume=run) == 0
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(tmp_path / "old", run / "checkpoints")
    assert train(None, "train.steps=3", "checkpoint.mirror=none", resume=run) == 0, "back to 2, on purpose"
    assert mirrored(run, url) == [6] and saved(run) == [3]
    assert train(None, "train.steps=4", f"checkpoint.mirror={url}", resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 3, "the mirror's 6 is of an earlier attempt"
    assert mirrored(run, url) == [4], "and makes way"


def test_what_waits_to_be_brought_is_not_deleted(tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    go_on, seen = threading.Event(), dict[int, list[int]]()
    real = Mirror.bring

    def bring(mirror: Mirror, checkpoint: Checkpoint, *rest: Any) -> None:
        if checkpoint.step == 1:
            go_on.wait(30)
            seen[1] = saved(run)
        real(mirror, checkpoint, *rest)

    def done(*_: object) -> None:
        go_on.set()

    with mock.patch.object(Mirror, "bring", bring), mock.patch("allranks.training.trainer.validate", done):
        settings = ("train.steps=4", "checkpoint.every=1", "checkpoint.keep=1", f"checkpoint.mirror={url}")
        assert start("Curve", run, *settings, "evaluate.every=4") == 0
    assert seen[1] == [1, 4] and saved(run) == [4] and mirrored(run, url) == [4]
