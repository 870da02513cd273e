"""The net under the tests has to catch: each leak is committed on purpose in a session of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leaks import environment_changes, leftover_files, list_tree

ROOT = Path(__file__).parents[1]

LEAKY = """
import os, subprocess, sys
import tests.leaks

tests.leaks.GRACE_SECONDS = 0.2

def test_environment():
    os.environ["LEAKED"] = "1"

def test_environment_was_put_back(monkeypatch):
    assert "LEAKED" not in os.environ
    monkeypatch.setenv("FINE", "1")

def test_child(monkeypatch):
    global child  # without a reference Python's own ResourceWarning would be first
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])

def test_child_was_killed():
    child.wait(1)

def test_orphan():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_passing():
    subprocess.run(["true"], check=True)
"""

LITTERING = """
from pathlib import Path

def test_litter(request):
    (request.config.rootpath / "runs").mkdir()
"""


def run_pytest(folder: Path, content: str) -> subprocess.CompletedProcess[str]:
    """A pytest session of its own on one test file, with this suite's conftest."""
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (folder / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_sample.py").write_text(content)
    (folder / "tests" / "__init__.py").write_text(f"__path__.append({str(ROOT / 'tests')!r})\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        "tests/test_sample.py",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_leaks_of_a_test_fail_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    done = run_pytest(tmp_path, LEAKY)
    assert "6 passed, 3 errors" in done.stdout, done.stdout + done.stderr
    for name, what in [("environment", "LEAKED: None -> '1'"), ("child", "left running"), ("orphan", "left running")]:
        assert f"ERROR at teardown of test_{name} " in done.stdout
        assert what in done.stdout


def test_a_file_left_in_the_tree_fails_the_session(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, LITTERING)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "LEFT IN THE TREE: runs" in done.stdout


def test_environment_changes() -> None:
    before = {"A": "1", "B": "2", "PYTEST_CURRENT_TEST": "x"}
    assert environment_changes(before, before | {"PYTEST_CURRENT_TEST": "y", "KMP_INIT_AT_FORK": "FALSE"}) == []
    assert environment_changes(before, {"A": "0", "C": "3"}) == ["A: '1' -> '0'", "B: '2' -> None", "C: None -> '3'"]


def test_files(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    before = list_tree(tmp_path)
    for name in ("src/new.py", "src/weights.safetensors", "notes.md"):
        (tmp_path / name).touch()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").touch()
    assert leftover_files(before, list_tree(tmp_path)) == ["notes.md", "src/weights.safetensors"]


def test_the_suite_itself_runs_under_the_net() -> None:
    assert os.environ.get("PYTEST_CURRENT_TEST", "").endswith("(call)")
