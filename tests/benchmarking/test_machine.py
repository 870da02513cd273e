"""What stands beside the figures."""

import json
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import torch

from allranks.benchmarking.machine import describe_machine, has_gpu, num_devices, source_commit
from allranks.process_environment import num_cores


def test_it_is_one_json_object() -> None:
    about = describe_machine("cpu")
    assert json.loads(json.dumps(about)) == about
    assert (about["torch"], about["cores"], about["gpus"]) == (torch.__version__, num_cores(), [])
    assert datetime.fromisoformat(str(about["date"])).tzinfo is not None
    assert about["commit"] == source_commit()


def test_the_commit_is_that_of_the_package_alone(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    package, other = tmp_path / "package", tmp_path / "installed"
    for folder in (package, other):
        folder.mkdir()
        (folder / "a.py").write_text("x = 1\n")
    assert source_commit(package) is None  # no repository
    git("init", "-q")
    git("add", "package")
    git("commit", "-qm", "a")
    head = git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "result.json").write_text("{}")
    assert source_commit(package) == head and source_commit(other) is None
    (package / "a.py").write_text("x = 2\n")
    assert source_commit(package) == f"{head}+changes"


@pytest.mark.parametrize("gpus", [0, 3])
def test_processes_go_on_gpus_where_there_are_some(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr("allranks.benchmarking.machine.num_cores", lambda: 5)
    assert (num_devices("cpu"), has_gpu("cpu")) == (5, False)
    assert (num_devices("auto"), has_gpu("auto")) == ((3, True) if gpus else (5, False))
