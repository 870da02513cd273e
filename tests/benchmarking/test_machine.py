"""What stands beside the figures."""

import json
import subprocess
from datetime import datetime
from pathlib import Path

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


def test_processes_go_on_gpus_where_there_are_some() -> None:
    assert num_devices("cpu") == num_cores() >= 1
    assert not has_gpu("cpu")
    assert has_gpu("auto") == torch.cuda.is_available()
    assert num_devices("auto") == (torch.cuda.device_count() or num_cores())
