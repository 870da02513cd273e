"""A checkpoint's directory: what opens, what is listed, what is newest and good, what may go."""

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.checkpointing import checkpoint as checkpoint_module
from allranks.checkpointing.checkpoint import (
    Checkpoint,
    Skipped,
    check_sizes,
    list_checkpoints,
    newest_good,
    seal,
    verify_files,
)
from allranks.checkpointing.retention import prune
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import counted_reads, flip, save_alone

DATA = "rank-00000.safetensors"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def reseal(path: Path) -> None:
    """Commit the manifest as it is now, as somebody would who means harm."""
    (path / "COMMITTED").write_bytes(seal((path / "manifest.json").read_bytes()))


def rewrite(path: Path, old: str, new: str) -> None:
    text = (path / "manifest.json").read_text()
    assert old in text
    (path / "manifest.json").write_text(text.replace(old, new))
    reseal(path)


def _no_file(path: Path) -> None:
    (path / DATA).unlink()


def _link(path: Path) -> None:
    (path / DATA).rename(path / "other")
    (path / DATA).symlink_to(path / "other")


def _linked_manifest(path: Path) -> None:
    (path / "manifest.json").rename(path / "other")
    (path / "manifest.json").symlink_to(path / "other")


def _torn_and_sealed(path: Path) -> None:
    os.truncate(path / "manifest.json", 300)
    reseal(path)


def _pipe(path: Path) -> None:
    (path / "COMMITTED").unlink()
    os.mkfifo(path / "COMMITTED")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "never committed": (lambda p: (p / "COMMITTED").unlink(), "has no COMMITTED file, so it was never finished"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "torn manifest": (lambda p: os.truncate(p / "manifest.json", 300), "is not the one that was committed"),
    "torn and sealed": (_torn_and_sealed, "the checkpoint is damaged"),
    "empty seal": (lambda p: (p / "COMMITTED").write_text(""), "is not the one that was committed"),
    "long seal": (lambda p: (p / "COMMITTED").write_text("x" * 5000), "has 5000 bytes, at most 4096"),
    "schema 2": (
        lambda p: rewrite(p, '"schema": 1', '"schema": 2'),
        "schema 2, this version of allranks reads schema 1",
    ),
    "traversal": (lambda p: rewrite(p, f'"{DATA}"', '"../x.safetensors"'), "should match pattern"),
    "absolute": (lambda p: rewrite(p, f'"{DATA}"', '"/etc/x.safetensors"'), "should match pattern"),
    "huge file": (lambda p: rewrite(p, '"bytes": ', '"bytes": 9'), "the chunks end at byte"),
    "no file": (_no_file, f"{DATA}: No such file or directory"),
    "short file": (lambda p: os.truncate(p / DATA, 100), f"{DATA}: 100 bytes, the manifest says"),
    "linked file": (_link, f"{DATA}: a symbolic link"),
    "linked manifest": (_linked_manifest, "manifest.json: a symbolic link"),
    "seal is a pipe": (_pipe, "COMMITTED: no ordinary file"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_no_whole_checkpoint_is_refused_in_one_line(tmp_path: Path, how: str) -> None:
    path = save_alone(tmp_path).path
    Checkpoint.open(path)
    break_it, message = BROKEN[how]
    break_it(path)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        Checkpoint.open(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and caught.value.exit_code == 78


def test_another_runs_and_no_directory_are_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path).path
    assert Checkpoint.open(str(path), run_id="run-a").step == 200
    with pytest.raises(CheckpointError, match="belongs to run 'run-a', not to 'run-b'"):
        Checkpoint.open(path, run_id="run-b")
    with pytest.raises(CheckpointError, match="is no checkpoint: no such directory"):
        Checkpoint.open(tmp_path / "step-00000300")


def test_a_manifest_larger_than_the_cap_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_alone(tmp_path).path
    monkeypatch.setattr(checkpoint_module, "MANIFEST_BYTES_CAP", 100)
    with pytest.raises(CheckpointError, match="at most 100 are read"):
        Checkpoint.open(path)


def test_two_hundred_flipped_bits_and_truncations_are_found_by_verify(tmp_path: Path) -> None:
    path = save_alone(tmp_path).path
    draw = random.Random(0)
    for place in range(200):
        victim = path / draw.choice([DATA, "manifest.json", "COMMITTED"])
        content = victim.read_bytes()
        if place % 4 == 0:
            victim.write_bytes(content[: draw.randrange(len(content))])
        else:
            flip(victim, draw.randrange(len(content) * 8))
        with pytest.raises(CheckpointError):
            verify_files(Checkpoint.open(path))
        victim.write_bytes(content)
    verify_files(Checkpoint.open(path))


def test_a_file_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    first, second = save_alone(tmp_path, 100), save_alone(tmp_path, 200, state={"other": 1})
    (first.path / DATA).write_bytes((second.path / DATA).read_bytes())
    verify_files(Checkpoint.open(first.path))  # the same tensors: the same bytes
    (first.path / "manifest.json").write_bytes((second.path / "manifest.json").read_bytes())
    with pytest.raises(CheckpointError, match="is not the one that was committed"):
        Checkpoint.open(first.path)


def test_committed_ones_are_listed_newest_first(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == []
    for step in (100, 1_000_000_000, 20):
        save_alone(tmp_path, step)
    for name in ("step-00000300", "step-00000400.tmp-x", ".trash-step-00000500-x", "step-6", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000400.tmp-x" / "COMMITTED").write_text("x")
    (tmp_path / "step-00000700").symlink_to(tmp_path / "step-00000100")
    (tmp_path / "step-00000800").write_text("x")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1000000000", "step-00000100", "step-00000020"]


def test_the_newest_good_one_is_found_and_the_others_are_accounted_for(tmp_path: Path) -> None:
    assert newest_good(tmp_path) == (None, [])
    for step in (100, 200, 300, 400):
        save_alone(tmp_path, step)
    flip(tmp_path / "step-00000400" / DATA, 8 * 1200)
    (tmp_path / "step-00000300" / "manifest.json").unlink()
    good, skipped = newest_good(tmp_path, "run-a")
    assert good == Checkpoint.open(tmp_path / "step-00000200")
    assert [skip.path.name for skip in skipped] == ["step-00000400", "step-00000300"]
    assert "have SHA-256" in skipped[0].reason and isinstance(skipped[1], Skipped)
    quick, skipped = newest_good(tmp_path, "run-a", check=check_sizes)
    assert quick is not None and quick.step == 400 and not skipped
    with counted_reads() as (opened, read):
        assert newest_good(tmp_path, "run-a", check=check_sizes) == (quick, [])
    assert opened == [tmp_path / "step-00000400" / DATA] and not read
    none, skipped = newest_good(tmp_path, "run-b")
    assert none is None and len(skipped) == 4


@pytest.mark.parametrize("good", [True, False])
def test_a_run_that_goes_on_while_its_newest_is_read_deletes_nothing_that_counts(tmp_path: Path, good: bool) -> None:
    asked = list[int]()

    def check(checkpoint: Checkpoint) -> None:
        asked.append(checkpoint.step)
        if len(asked) == 1:
            for step in (300, 400):
                save_alone(tmp_path, step)
            gone = prune(tmp_path, 2, check=check_sizes)
            assert tmp_path / "step-00000100" in gone and checkpoint.path.is_dir(), "what is read stays"
        if not good and checkpoint.step == 200:
            raise CheckpointError("damaged")
        verify_files(checkpoint)

    for step in (100, 200):
        save_alone(tmp_path, step)
    found, skipped = newest_good(tmp_path, "run-a", check)
    assert found is not None and skipped == []
    assert (found.step, asked) == ((200, [200]) if good else (400, [200, 400])), "of those that are there now"


def test_where_all_that_were_listed_are_gone_there_is_none(tmp_path: Path) -> None:
    def check(checkpoint: Checkpoint) -> None:
        shutil.rmtree(checkpoint.path)  # by hand, which no lock keeps anybody from
        verify_files(checkpoint)

    save_alone(tmp_path, 100)
    assert newest_good(tmp_path, "run-a", check) == (None, [])


def test_the_module_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, allranks.checkpointing.checkpoint; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkpoint_shows_its_step_and_place(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    assert repr(checkpoint) == f"<Checkpoint step 200 '{tmp_path / 'step-00000200'}'>"
    assert checkpoint.num_bytes == (checkpoint.path / DATA).stat().st_size


def test_one_whose_manifest_alone_is_read_is_what_an_open_one_is(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    with counted_reads() as (opened, _):
        assert Checkpoint.read(checkpoint.path, "run-a") == checkpoint
    assert not opened
    with pytest.raises(CheckpointError, match="belongs to run 'run-a', not to 'run-b'"):
        Checkpoint.read(checkpoint.path, "run-b")
    (checkpoint.path / DATA).unlink()
    assert Checkpoint.read(checkpoint.path) == checkpoint
    with pytest.raises(CheckpointError, match=DATA):
        Checkpoint.open(checkpoint.path)


def test_only_the_name_of_its_own_step_is_that_of_a_checkpoint(tmp_path: Path) -> None:
    saved = save_alone(tmp_path, 2)
    wrong = Path(shutil.copytree(saved.path, tmp_path / "step-00000004"))
    found, skipped = newest_good(tmp_path)
    assert found == saved
    assert [(skip.path, skip.reason) for skip in skipped] == [
        (wrong, f"{wrong} holds step 2, not that of its name; the checkpoint is damaged")
    ]
    with pytest.raises(CheckpointError, match="holds step 2, not that of its name"):
        Checkpoint.open(Path(shutil.copytree(saved.path, tmp_path / "step-000000002")))
    for name in ("best", "step-00000004.bak", "step-4", "backup-step-00000004"):
        copied = Path(shutil.copytree(saved.path, tmp_path / name))
        verify_files(Checkpoint.open(copied))
