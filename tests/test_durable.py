"""Files whole or absent, and refusals of one line, on file systems that really refuse."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.durable import (
    check_target,
    make_folders,
    preflight_writable,
    refusing,
    replacing,
    write_json,
    write_whole,
)
from allranks.errors import ConfigError, RunError


def test_replacing_shows_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_replacing_leaves_the_old_file_and_nothing_else_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_write_json_never_overwrites(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "a.json", {"a": 2})


def test_refusing_makes_one_line_of_what_the_system_says(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^\S+/runs cannot be written: Not a directory; choose another place"):
        (tmp_path / "file").touch()
        with refusing(tmp_path / "runs"):
            (tmp_path / "file" / "x").mkdir()


def test_preflight_leaves_nothing_behind_and_makes_no_directory(tmp_path: Path) -> None:
    preflight_writable(tmp_path / "not" / "there" / "yet")
    preflight_writable(tmp_path)
    assert os.listdir(tmp_path) == []


def test_preflight_refuses_where_a_file_stands(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        preflight_writable(tmp_path / "file" / "runs")


def test_preflight_refuses_what_reads_back_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "something else")
    with pytest.raises(RunError, match="reads back differently"):
        preflight_writable(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/1").exists(), reason="no /proc here")
def test_preflight_refuses_a_directory_that_the_kernel_keeps() -> None:
    with pytest.raises(RunError, match=r"^/proc/1/runs cannot be written: "):
        preflight_writable(Path("/proc/1/runs"))


def test_preflight_refuses_a_read_only_file_system(tmp_path: Path) -> None:
    """Really mounted read-only, in a namespace of its own, because root may write whatever the mode bits say."""
    probe = "import sys, pathlib; from allranks.durable import preflight_writable as p; p(pathlib.Path(sys.argv[1]))"
    script = 'mount -t tmpfs -o ro none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, probe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine allows no mounts")
    assert done.stderr.rstrip().endswith(
        f"RunError: {tmp_path} cannot be written: Read-only file system; choose another place with --run DIR"
    )


def test_a_file_of_the_users_is_whole_or_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "plan.html"
    write_whole(path, "first")
    assert path.read_text() == "first"
    monkeypatch.setattr("allranks.durable.sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ConfigError, match=r"plan.html cannot be written: No space left; name another place"):
        write_whole(path, "second")
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_a_place_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*cannot be written"):
        write_whole(tmp_path / "file" / "RUN.toml", "")


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_what_names_no_file_is_refused_before_the_work_and_after(name: str) -> None:
    for refuse in (check_target, lambda path: write_whole(path, "")):
        with pytest.raises(ConfigError, match=r"^'[./]' names no file; write the name of one behind it"):
            refuse(Path(name))


def test_a_target_is_checked_before_the_work_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for fine in ("file", "new.html", "not/yet/there.html"):
        check_target(tmp_path / fine)
    refusals = {"folder": "is a directory", "file/x.html": "cannot be written: Not a directory", "x" * 300: "too long"}
    for name, reason in refusals.items():
        with pytest.raises(ConfigError, match=rf"^{tmp_path}/{name}.*{reason}.*; name "):
            check_target(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"] and (tmp_path / "file").read_text() == "old"


def test_preflight_refuses_a_place_that_nobody_may_look_at(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written: File name too long; choose another place"):
        preflight_writable(tmp_path / ("x" * 300) / "runs")


def test_folders_are_made_where_they_are_missing(tmp_path: Path) -> None:
    make_folders(tmp_path / "run", ("logs", "traces"))
    (tmp_path / "run" / "logs" / "kept").touch()
    (tmp_path / "run" / "traces").rmdir()
    make_folders(tmp_path / "run", ("logs", "traces"))
    assert sorted(os.listdir(tmp_path / "run")) == ["logs", "traces"] and (tmp_path / "run/logs/kept").exists()
    (tmp_path / "run" / "traces").rmdir()
    (tmp_path / "run" / "traces").touch()
    with pytest.raises(RunError, match=r"run/traces is no directory, which a run keeps there; move it away$"):
        make_folders(tmp_path / "run", ("logs", "traces"))
    (tmp_path / "run/logs/rank-00000.log").symlink_to("/tmp/elsewhere")
    with pytest.raises(RunError, match=r"logs/rank-00000\.log is a link: another file would be written; remove it$"):
        make_folders(tmp_path / "run", ("logs",))


def test_a_name_that_is_no_utf8_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RUN.toml would hold a name that is no UTF-8: 'spec = caf.udce9.py'"):
        write_whole(tmp_path / "RUN.toml", "spec = caf\udce9.py")
    assert list(tmp_path.iterdir()) == []
