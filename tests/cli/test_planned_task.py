"""A Task as the planner sees it: config as `train` reads it, model as it is traced."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from allranks.cli.main import main
from allranks.cli.planned_task import task_facts
from allranks.errors import ConfigError, TaskError
from allranks.profiling.known_tasks import find_known, keep_known
from allranks.request import TrainRequest
from allranks.training.prepare import prepare
from allranks.training.sketch import sketch_of
from allranks.upkeep import Upkeep
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
    assert facts["task"] == POINTS and facts["micro_batch"] == 2 and not facts["layout"].chosen
    assert facts["settings"] == {"train.steps": 5, "optimizer.lr": 0.5}


def test_what_the_tasks_defaults_name_counts_but_for_what_the_user_gives(tmp_path: Path) -> None:
    """As for `train`. RUN.toml needs none of it: the Task says it again."""
    defaults = '{"train.precision": "float64", "train": {"micro_batch": 4}, "train.micro_steps": None}'
    (tmp_path / "pairs.py").write_text(COUPLED.replace("coupled = True", f"defaults = {defaults}"))
    task = str(tmp_path / "pairs.py")
    facts = task_facts(task, None, ())
    assert (facts["precision"], facts["micro_batch"], facts["micro_steps"]) == ("float64", 4, None)
    assert facts["defaulted"] == {"precision", "micro_batch"} and not facts["settings"]
    facts = task_facts(task, None, ("train.precision=float32",))
    assert (facts["precision"], facts["defaulted"]) == ("float32", {"micro_batch"})
    facts = task_facts(POINTS, None, ())
    assert (facts["precision"], facts["micro_batch"], facts["defaulted"]) == (None, None, frozenset())


def test_a_plan_takes_what_the_tasks_defaults_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's compiler, which tracing imports, sets it where nobody did.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    defaults = '{"train.precision": "float64", "train.micro_batch": 2, "train.global_batch": 16}'
    (tmp_path / "pairs.py").write_text(COUPLED.replace("coupled = True", f"defaults = {defaults}"))
    plan = ["plan", str(tmp_path / "pairs.py"), "--cluster", "2:a100-80g"]
    assert main([*plan, "--save", str(tmp_path / "plans")]) == 0
    told = capsys.readouterr().out
    for noun in ("precision float64", "micro-batch 2"):
        assert f"{noun}, because the Task's defaults name it" in told
    saved = tomllib.loads((tmp_path / "plans" / "RUN.toml").read_text())["train"]
    assert saved == {"global_batch": 16, "micro_batch": 2, "precision": "float64"}
    assert main([*plan, "--precision", "float32", "--micro-batch", "4"]) == 0
    assert "Task's defaults" not in capsys.readouterr().out


def test_what_optimizer_and_average_keep_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's compiler, which tracing imports, sets it where nobody did.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    own = "    def optimizer(self, parameters):\n        return torch.optim.SGD(parameters, lr=0.1)\n"
    (tmp_path / "pairs.py").write_text(COUPLED)
    (tmp_path / "own.py").write_text(COUPLED + own)
    held, notes = {}, {}
    for task, *keys in (("pairs",), ("pairs", "train.ema=0.9"), ("pairs", "optimizer.name=sgd"), ("own",)):
        words = [str(tmp_path / f"{task}.py"), *keys]
        assert main(["plan", *words, "--cluster", "1:a100-80g", "--precision", "float32", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        held[task, *keys] = told["best"]["bytes_by_category"].get("optimizer", 0.0)
        notes[task] = [note for note in told["notes"] if "own optimizer" in note]
    parameters = 4 * 8 + 8
    assert list(held.values()) == [8 * parameters, 12 * parameters, 0, 8 * parameters]
    assert not notes["pairs"] and "--check counts them" in notes["own"][0]


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


def test_what_a_start_could_not_trace_is_known_after_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    key = sketch_of(prepare(TrainRequest(task_spec=POINTS)), "cpu").key
    keep_known(key, {}, fault="its trace took longer than 60 s; `allranks plan` waits for it")
    profile = task_facts(POINTS, None, ())["make"](None, "float32", "cpu")
    known = find_known(key)
    assert known is not None and (known.fault, known.profiles) == ("", {"float32": profile})


BRANCHING = """
import torch
import allranks

class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 32), torch.nn.Linear(32, 2)
    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden if hidden.sum() > 0 else -hidden)

class Branches(allranks.Task):
    def dataset(self, split):
        return [{"x": torch.ones(4) * n, "y": n % 2} for n in range(32)] if split == "train" else None
    def model(self):
        return Branch()
    def loss(self, output, batch):
        return torch.nn.functional.cross_entropy(output, batch["y"], reduction="sum")
"""


def test_a_model_that_cannot_be_traced_is_planned_from_real_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal names the operation and a command; that command, typed as it stands, plans the model."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    task = tmp_path / "branches.py"
    task.write_text(BRANCHING)
    words = ["plan", str(task), "train.global_batch=16", "--cluster", "2:h100", "--json"]
    assert main(words) == 2
    refused = capsys.readouterr()
    assert "a branch on a tensor) needs values" in refused.err and refused.err.count("\n") == 1
    command = re.search(r"`allranks (plan) (--measured)`", refused.err)
    assert command is not None
    assert main([*words, command[2]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 4 * 32 + 32 + 32 * 2 + 2 and found["fits"]
    assert any("real steps, because --measured" in note for note in found["notes"])
    profile = task_facts(str(task), None, (), measured=True)["make"](None, "float32", "cuda")
    assert profile.source == "measured" and profile.flops == 2 * (4 * 32 + 32 * 2)


@pytest.mark.parametrize(
    ("line", "advised"), [("hidden.detach().numpy()", True), ("raise RuntimeError('bad weather')", False)]
)
def test_real_steps_that_fail_for_their_type_are_to_be_measured_in_float32(
    line: str, advised: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """numpy has no bfloat16, which the plan itself took; the advice, typed as it stands, plans the model."""
    task = tmp_path / "branches.py"
    task.write_text(BRANCHING.replace("        return self.second(", f"        {line}\n        return self.second("))
    words = ["plan", str(task), "train.global_batch=16", "--cluster", "2:h100", "--measured", "--json"]
    assert main(words) == 2
    told = capsys.readouterr().err
    advice = re.search(r"the step ran in bfloat16, .*; with (--precision float32) it is measured without", told)
    assert bool(advice) == advised and "Branches's step raised:" in told
    if advice is not None:
        assert main([*words, *advice[1].split()]) == 0
        assert json.loads(capsys.readouterr().out)["fits"]


def test_upkeep_is_what_the_config_says_and_what_was_measured_here(tmp_path: Path) -> None:
    keys = ("checkpoint.every=50", "data.workers=2")
    upkeep = task_facts(POINTS, None, keys)["upkeep"]
    assert upkeep("cuda", False) == Upkeep(50, beside=True, workers=2)
    here = upkeep("cpu", True)
    assert (here.save_every, here.beside, here.workers) == (50, False, 2)
    assert here.sample_seconds is not None and 0 < here.sample_seconds < 1


def test_trace_and_timing_build_the_dataset_once(tmp_path: Path) -> None:
    once = "assert not hasattr(Pairs, 'built'); Pairs.built = True; return [{"
    (tmp_path / "once.py").write_text(COUPLED.replace("return [{", once))
    facts = task_facts(str(tmp_path / "once.py"), None, ())
    assert facts["upkeep"]("cpu", True).sample_seconds > 0
    assert [facts["make"](None, name, "cpu").precision for name in ("float32", "bfloat16")] == ["float32", "bfloat16"]


def test_a_task_that_is_not_there_is_refused() -> None:
    with pytest.raises(TaskError, match="no Task file"):
        task_facts("nowhere.py", None, ())


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_dataset_that_ends_the_process_does_not_say_that_it_fits(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = COUPLED.replace("        return [", "        raise SystemExit(0)\n        return [")
    (tmp_path / "ending.py").write_text(words)
    assert main([command, str(tmp_path / "ending.py"), "--cluster", "8:h100"]) == 2
    assert "Pairs fails on the first samples of its dataset:" in capsys.readouterr().err
