"""A Task as the planner sees it: config as `train` reads it, model as it is traced."""

from pathlib import Path

import pytest

from allranks.cli.planned_task import task_facts
from allranks.errors import ConfigError, TaskError
from tests.commands import POINTS

COUPLED = """
import torch
import allranks

class Pairs(allranks.Task):
    coupled = True
    width: int = 8
    def dataset(self, split):
        return [{"x": torch.ones(4) * n} for n in range(32)] if split == "train" else None
    def model(self):
        return torch.nn.Linear(4, self.width)
    def loss(self, output, batch):
        return (output @ output.T).sum()
"""


def test_what_the_config_says_is_kept() -> None:
    facts = task_facts(POINTS, None, ("train.global_batch=24", "train.precision=bfloat16", "layout.dp_shard=2"))
    assert facts["task"] == POINTS
    assert (facts["global_batch"], facts["precision"], facts["micro_batch"]) == (24, "bfloat16", None)
    assert facts["layout"].dp_shard == 2
    assert facts["settings"] == {"train.global_batch": 24, "train.precision": "bfloat16"}


def test_a_file_and_its_keys_count_as_given(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'task = "{POINTS}"\n[train]\nsteps = 5\nmicro_batch = 2\n')
    facts = task_facts(None, tmp_path / "run.toml", ("optimizer.lr=0.5",))
    assert facts["task"] == POINTS and facts["micro_batch"] == 2 and facts["layout"] is None
    assert facts["settings"] == {"train.steps": 5, "optimizer.lr": 0.5}


def test_the_model_is_traced_once_for_each_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's compiler, which tracing imports, sets it where nobody did.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    (tmp_path / "pairs.py").write_text(COUPLED)
    facts = task_facts(str(tmp_path / "pairs.py"), None, ("task.width=16",))
    profile = facts["make"](None, "float32", "cpu")
    assert profile.parameters == 4 * 16 + 16 and profile.coupled
    assert facts["make"](None, "float32", "cpu") is profile
    assert facts["make"](None, "float32", "cuda") is not profile
    assert facts["micro_steps"] == 1 and facts["settings"] == {"task.width": 16}
    with pytest.raises(ConfigError, match="a Task's samples are as long as its dataset makes them"):
        facts["make"](2048, "float32", "cpu")


def test_a_task_that_is_not_there_is_refused() -> None:
    with pytest.raises(TaskError, match="no Task file"):
        task_facts("nowhere.py", None, ())
