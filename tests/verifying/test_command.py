"""A file with build, step and data is a loop of its own; every other one holds a Task."""

import os
from pathlib import Path

import pytest

from allranks.errors import ConfigError, TaskError
from allranks.request import TrainRequest
from allranks.verifying.command import is_own_loop, verify_request
from tests.commands import POINTS

LOOP = "def build(distributed): ...\ndef step(model, optimizer, batches): ...\ndata = []\n"


def test_forms(tmp_path: Path) -> None:
    loop = tmp_path / "own_forms.py"
    loop.write_text(LOOP)
    assert is_own_loop(str(loop)) and not is_own_loop(POINTS) and not is_own_loop(f"{loop}:Task")
    assert not is_own_loop("package.module:Task")


def test_a_loop_takes_no_config(tmp_path: Path) -> None:
    loop = tmp_path / "own_config.py"
    loop.write_text(LOOP)
    with pytest.raises(ConfigError, match="which --layout cannot change: leave it out"):
        verify_request(TrainRequest(task_spec=str(loop), layout="ddp"), 4)


def test_what_is_missing_is_said_first(tmp_path: Path) -> None:
    loop = tmp_path / "own_half.py"
    loop.write_text("def build(distributed): ...\ndata = []\n")
    with pytest.raises(TaskError, match=r"own_half.py defines no step"):
        verify_request(TrainRequest(task_spec=str(loop)), 4)


BUILD = """
import torch
def build(distributed):
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters())
"""
HIDDEN = """
import os
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
"""
TASK = f"""
import importlib.util
{HIDDEN}
spec = importlib.util.spec_from_file_location("points_of_the_tests", {POINTS.split(":")[0]!r})
points = importlib.util.module_from_spec(spec)
spec.loader.exec_module(points)

class Hidden(points.Points):
    def model(self):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        return super().model()
"""


@pytest.mark.distributed
def test_neither_this_process_nor_the_others_see_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "own_hidden.py").write_text(HIDDEN + BUILD + LOOP.partition("\n")[2])
    (tmp_path / "task_hidden.py").write_text(TASK)
    answer = verify_request(TrainRequest(task_spec=str(tmp_path / "own_hidden.py")), 2)
    assert "CUDA_VISIBLE_DEVICES" not in str(answer), str(answer)
    answer = verify_request(TrainRequest(task_spec=str(tmp_path / "task_hidden.py:Hidden"), layout="ddp"), 2)
    assert answer.equal, str(answer)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
