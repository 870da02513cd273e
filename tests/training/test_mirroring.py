"""Checkpoints on their way to a mirror: beside the training, newest first, and back where the run has lost its own."""

import importlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.mirror import Mirror
from allranks.checkpointing.retention import bytes_in
from allranks.errors import CheckpointError, RunError
from allranks.observing import heartbeat
from allranks.run import Run
from allranks.training.mirroring import Mirroring
from tests.checkpointing.worlds import save_alone
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, damage, events, same_run, saved, start, train, train_outside

# Its names are replaced below, which a type checker would only allow for names that it exports.
mirror_module: Any = importlib.import_module("allranks.checkpointing.mirror")

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
    *told, last = [event["what"] for event in events(run, "verdict")]
    assert saved(run) == [4, 6] and len(told) in (1, 2), "at the start, and at the first checkpoint"
    assert last.startswith(str(url)) and last.endswith(
        "; the run ends, and has no copy of step-00000006 there: a resume makes it"
    )
    assert sum("; the run goes on" in line for line in told) == 1
    assert all(str(url) in line and "\n" not in line for line in told)


def test_of_those_that_wait_the_newest_alone_is_brought_and_nothing_goes_meanwhile(tmp_path: Path) -> None:
    go_on, brought = threading.Event(), list[int]()

    class Slow:
        """In place of a Mirror."""

        def bring(self, checkpoint: Checkpoint, advanced: Any) -> None:
            go_on.wait(30)
            brought.append(checkpoint.step)
            advanced()

        def prune(self, keep: int, keep_every: int | None, advanced: Any) -> None:
            assert (keep, keep_every) == (2, None)

    slow: Any = Slow()
    told = list[str]()
    mirroring = Mirroring(slow, 2, None, told.append)
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
    assert brought[-1] == 200 and told == [], "it begins again"


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

    def prune(self, keep: int, keep_every: int | None, advanced: Any) -> None:
        """Nothing."""


def bring_all(mirroring: Mirroring, *checkpoints: Checkpoint) -> None:
    """Each after the one before was brought, or was not; the end is not told of."""
    for checkpoint in checkpoints:
        mirroring.bring(checkpoint)
        while mirroring._thread is not None:
            time.sleep(0.001)


def test_each_outage_is_told_of_once_and_what_is_not_there_at_the_end(tmp_path: Path) -> None:
    mirror, told, away = Mirror(str(tmp_path / "mirror"), "run-a"), list[str](), False
    real = Mirror._put

    def put(*given: Any) -> None:
        if away:
            raise OSError(5, "Input/output error")
        real(*given)

    mirroring = Mirroring(mirror, 2, None, told.append)
    saves = [save_alone(tmp_path / "a", step) for step in range(1, 9)]
    counts = list[int]()
    with mock.patch.object(Mirror, "_put", put):
        for checkpoint in saves:
            away = checkpoint.step in (2, 3, 6, 7, 8)
            bring_all(mirroring, checkpoint)
            counts.append(len(told))
    assert counts == [0, 1, 1, 1, 1, 2, 2, 2]
    mirroring.finish(lambda: None)
    assert len(told) == 3 and told[1].endswith("the run goes on, and tries again after every checkpoint")
    assert told[2].endswith(
        "Input/output error; the run ends, and has no copy of step-00000008 there: a resume makes it"
    )
    bring_all(mirroring, saves[-1])
    mirroring.finish(lambda: None)
    assert len(told) == 3 and [found.step for found in mirror.list_newest()] == [8, 5]


def test_one_that_nobody_can_bring_any_more_hides_no_outage(tmp_path: Path) -> None:
    refusing, told = Refusing(CheckpointError("away")), list[str]()
    mirroring = Mirroring(cast(Any, refusing), 2, 200, told.append)
    first, second, third = (save_alone(tmp_path, step) for step in (200, 300, 500))
    bring_all(mirroring, first)
    shutil.rmtree(first.path)
    bring_all(mirroring, second)
    refusing.errors.append(CheckpointError("away again"))
    bring_all(mirroring, third)
    assert refusing.brought == [300] and [line.partition(";")[0] for line in told] == ["away", "away again"]


def test_what_alone_is_refused_each_time_is_told_of_once_and_at_the_end(tmp_path: Path) -> None:
    class Choosy(Refusing):
        """Does not take one that is to stay for ever."""

        def bring(self, checkpoint: Checkpoint, advanced: Any) -> None:
            if checkpoint.step == 200:
                raise CheckpointError("not this one")
            super().bring(checkpoint, advanced)

    choosy, told = Choosy(), list[str]()
    mirroring = Mirroring(cast(Any, choosy), 2, 200, told.append)
    bring_all(mirroring, *(save_alone(tmp_path, step) for step in (200, 300, 500, 700)))
    mirroring.finish(lambda: None)
    assert choosy.brought == [300, 500, 700]
    assert [line.partition(";")[0] for line in told] == ["not this one"] * 2 and "copy of step-00000200" in told[1]


class Small:
    """In place of `_copy`: a file system with room for so many checkpoints."""

    def __init__(self, root: Path, room: int) -> None:
        self.root, self.room, self.real = root, room, mirror_module._copy

    def __call__(self, source: Path, target: Path, advanced: Any) -> None:
        self.real(source, target, advanced)
        taken = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        if taken > self.room:
            with target.open("r+b") as file:
                file.truncate(target.stat().st_size // 2)
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("takes_back", [True, False], ids=["error", "kill"])
def test_a_mirror_that_was_full_once_is_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_back: bool
) -> None:
    """It has room for keep and one more: what was half-brought must not stay in the way of the next one."""
    root = tmp_path / "mirror"
    saves = [save_alone(tmp_path / "a", step) for step in range(1, 7)]
    small = Small(root, int(3.2 * bytes_in(saves[0].path)))
    monkeypatch.setattr(mirror_module, "_copy", small)
    if not takes_back:
        monkeypatch.setattr(Mirror, "_take_back", lambda *given: None)
    mirror, told = Mirror(str(root), "run-a"), list[str]()
    mirroring = Mirroring(mirror, 2, None, told.append)
    bring_all(mirroring, *saves[:2])
    (root / "ballast").write_bytes(bytes(int(0.7 * bytes_in(saves[0].path))))
    bring_all(mirroring, saves[2])
    (root / "ballast").unlink()
    assert [found.step for found in mirror.list_newest()] == [2, 1] and len(told) == 1
    if not takes_back:  # another process goes on
        mirroring = Mirroring(mirror, 2, None, told.append)
    for checkpoint in saves[3:]:
        bring_all(mirroring, checkpoint)
        assert mirror.list_newest()[0].step == checkpoint.step
        assert len(list(Path(mirror._root).iterdir())) == 2
    assert len(told) == 1


def test_old_ones_that_could_not_go_once_make_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = [save_alone(tmp_path / "a", step) for step in range(1, 6)]
    monkeypatch.setattr(mirror_module, "_copy", Small(tmp_path / "mirror", int(3.2 * bytes_in(saves[0].path))))
    mirror = Mirror(str(tmp_path / "mirror"), "run-a")
    mirroring = Mirroring(mirror, 2, None, lambda line: None)
    bring_all(mirroring, *saves[:2])
    with mock.patch.object(Mirror, "_prune", side_effect=ConnectionError("reset")):
        bring_all(mirroring, saves[2])
    bring_all(mirroring, saves[3])
    assert [found.step for found in mirror.list_newest()] == [4, 3]


def test_a_place_that_stands_still_is_not_waited_for_twice(tmp_path: Path) -> None:
    mirror, told = Mirror(str(tmp_path / "mirror"), "run-a", patience=0.3), list[str]()
    mirroring = Mirroring(mirror, 2, None, told.append)
    with (
        mock.patch.object(mirror, "_prune", side_effect=TimeoutError("it stands still")),
        mock.patch.object(mirror, "_bring") as bring,
    ):
        bring_all(mirroring, save_alone(tmp_path / "a", 1))
    assert bring.mock_calls == [] and len(told) == 1 and "it stands still" in told[0]
    with mock.patch.object(mirror, "_prune", side_effect=PermissionError("no")):
        bring_all(mirroring, save_alone(tmp_path / "a", 2))
    assert [found.step for found in mirror.list_newest()] == [2], "who may not delete may bring"


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
    assert refusing.brought == [300] and len(told) == 4, "told with the next one, at both ends, and then not again"


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
