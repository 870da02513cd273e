"""What the fork server imports, and what it reports about itself."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.surviving import preload
from allranks.surviving.preload import Report

SOUND = Report(pid=1, seconds=0.5, threads=1, cuda=False, failure="")
TORCH = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized={}))
"""
SHOW = """
import json, os, signal, sys
from dataclasses import asdict
from allranks.surviving import preload
held = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(json.dumps([asdict(preload.REPORT), sorted(sys.modules), held, preload.VARIABLE in os.environ]))
"""


def report(folder: Path, *, modules: tuple[str, ...] = (), task: str | None = None) -> tuple[Report, list[str]]:
    """What a server would report after these imports, and the modules it then has."""
    paths = [str(folder), *sys.path]
    wanted = json.dumps({"modules": modules, "task": task, "sys_path": paths, "parent": os.getpid()})
    command = [sys.executable, "-c", SHOW]
    environ = os.environ | {preload.VARIABLE: wanted}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    fields, names, held, still_asked = json.loads(done.stdout.splitlines()[-1])
    assert held
    assert not still_asked
    return Report(**fields), names


def test_imports_what_is_asked_and_is_sound(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import colorsys")
    (tmp_path / "task.py").write_text("import chunk_of_mine")
    (tmp_path / "chunk_of_mine.py").touch()
    found, names = report(tmp_path, modules=("mine",), task=f"{tmp_path}/task.py:Name")
    assert found.hindrance() is None
    assert found.threads == 1
    assert {"mine", "colorsys", "chunk_of_mine"} <= set(names)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads"),
        (TORCH.format("bool"), ""),
        (TORCH.format("lambda: True"), "CUDA"),
        ("raise ValueError('no\\nat all')", "preload failed: no"),
        ("raise SystemExit", "preload failed: SystemExit"),
        ("import no_such_module_of_mine", "preload failed: No module named 'no_such_module_of_mine'"),
    ],
)
def test_whatever_a_module_does_is_reported(tmp_path: Path, source: str, word: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    hindrance = report(tmp_path, modules=("mine",))[0].hindrance()
    assert (hindrance is None) == (word == "")
    assert word in (hindrance or "")


def test_a_task_that_does_not_parse_is_reported(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def model(self:\n")
    hindrance = report(tmp_path, task=f"{tmp_path}/task.py")[0].hindrance()
    assert hindrance == "the preload failed: task.py does not parse"


def test_hindrances() -> None:
    assert SOUND.hindrance() is None
    assert "3 threads" in (replace(SOUND, threads=3).hindrance() or "")
    assert "CUDA" in (replace(SOUND, cuda=True).hindrance() or "")


def test_an_open_driver_counts_as_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-uvm"
    driver.touch()
    monkeypatch.setattr(preload, "CUDA_DRIVER_FILE", str(driver))
    assert not preload.cuda_is_initialised()
    with driver.open():
        assert preload.cuda_is_initialised()


def test_an_ordinary_import_does_nothing() -> None:
    assert preload.REPORT is None
