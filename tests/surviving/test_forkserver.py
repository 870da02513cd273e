"""The fork server is used where it is sound, and replaced where what it knows is old."""

import os
import signal
import subprocess
import sys
from multiprocessing import forkserver as standard
from pathlib import Path

import pytest

from allranks.surviving import forkserver
from tests.processes import is_gone, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(sys.platform != "linux", reason="fork servers are Linux's")]


def pid() -> int:
    found: int = standard._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return found


def test_a_sound_server_is_used_and_kept(small_server: None) -> None:
    before = dict(os.environ)
    forkserver.start()
    first = pid()
    assert dict(os.environ) == before
    method = forkserver.choose_start_method()
    assert method.name == "forkserver"
    assert "one thread" in str(method.decision)
    assert forkserver.choose_start_method().name == "forkserver"
    assert pid() == first


def test_a_killed_server_is_started_again(small_server: None) -> None:
    forkserver.choose_start_method()
    first = pid()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: is_gone(first))
    assert forkserver.choose_start_method().name == "forkserver"
    assert pid() != first


def test_what_is_read_at_import_needs_another_server(small_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forkserver.start()
    first = pid()
    monkeypatch.setenv("ALLRANKS_TEST", "1")
    forkserver.start()
    assert pid() == first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    forkserver.start()
    second = pid()
    assert first != second
    assert is_gone(first)
    forkserver.start(modules=["colorsys"])
    third = pid()
    assert third != second
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere"])  # workers are told the present one
    assert forkserver.choose_start_method().name == "forkserver"
    assert pid() == third


@pytest.mark.parametrize(
    ("source", "because"),
    [
        ("def broken(:\n", "the preload failed: task.py does not parse"),
        ("raise ValueError('mine')\n", "the preload failed: task.py cannot be imported"),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", "2 threads"),
        ("import os\nos._exit(3)\n", "the fork server ended while it imported"),
    ],
)
def test_workers_are_spawned_where_the_users_file_hinders(
    small_server: None, tmp_path: Path, source: str, because: str
) -> None:
    (tmp_path / "task.py").write_text(source)
    forkserver.start(task=str(tmp_path / "task.py"))
    method = forkserver.choose_start_method()
    assert method.name == "spawn"
    assert because in method.decision.because


@pytest.mark.parametrize("start", ["choose_start_method().name", "call_spawned('os:getcwd')"])
def test_a_users_file_takes_the_place_of_no_module_of_pythons(tmp_path: Path, start: str) -> None:
    """`multiprocessing` starts its helpers with -c, which looks into the current folder first."""
    for name in ("pickle", "random", "re", "socket", "tokenize"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is the user')\n")
    program = tmp_path / "bin" / "program.py"
    program.parent.mkdir()
    program.write_text(f"""
from allranks.surviving.aside import call_spawned
from allranks.surviving.forkserver import choose_start_method
print({start})
""")
    ran = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.strip() in ("forkserver", str(tmp_path)), ran.stderr
    assert ran.stderr == ""


def test_the_main_module_is_hidden_for_a_while() -> None:
    real = sys.modules["__main__"]
    with pytest.raises(KeyError), forkserver.main_hidden():
        assert sys.modules["__main__"].__spec__ is None
        raise KeyError
    assert sys.modules["__main__"] is real


def test_somebody_elses_server_is_not_used(small_server: None) -> None:
    standard.ensure_running()  # with other preloads, and without our environment
    stranger = pid()
    method = forkserver.choose_start_method()
    assert (method.name, method.decision.because) == ("spawn", "this program runs a fork server of its own")
    assert pid() == stranger


def test_elsewhere_than_on_linux_workers_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    method = forkserver.choose_start_method()
    assert method.name == "spawn"
    assert "darwin" in method.decision.because


def test_the_server_ends_when_nobody_needs_it(small_server: None) -> None:
    forkserver.choose_start_method()
    server = pid()
    os.close(standard._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # as when this process ends
    standard._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
    wait_until(lambda: is_gone(server), 10.0)
    os.waitpid(server, 0)
