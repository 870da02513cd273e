"""The trained model back on one device, with the numbers that training ended with."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.reading import unless_read
from allranks.errors import CheckpointError, ConfigError, RunError, TaskError
from allranks.run import Run
from allranks.training import load as load_module
from allranks.training import snapshot as snapshot_module
from allranks.training.load import load, make_task, task_of_run
from tests.training.runs import TASKS, damage, events, saved, start, train
from tests.training.tasks import Curve, points


def evaluated(model: nn.Module, dtype: torch.dtype = torch.float32) -> float:
    """The loss per point of the validation split, by a plain forward."""
    x, y = points(13, seed=len("validation")).tensors
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x.to(dtype)), y).item()


@pytest.mark.parametrize(
    ("task", "precision", "dtype"),
    [
        ("Curve", "float32", torch.float32),
        ("Curve", "float64", torch.float64),
        ("Normed", "float64", torch.float64),
        ("Tied", "float32", torch.float32),
        ("Tied", "float64", torch.float64),
    ],
)
def test_a_run_gives_its_model_back(tmp_path: Path, task: str, precision: str, dtype: torch.dtype) -> None:
    run = tmp_path / "run"
    assert start(task, run, "train.steps=3", f"train.precision={precision}", "task.width=4", "train.micro_steps=1") == 0
    model = allranks.load(run)
    assert isinstance(model, nn.Module) and not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    metrics = events(run, "evaluation")[-1]["metrics"]
    assert evaluated(model, dtype) == pytest.approx(metrics["loss"], rel=1e-12 if dtype is torch.float64 else 1e-5)


def test_extra_state_is_no_other_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Extra", run, "train.steps=3") == 0
    model = allranks.load(run)
    assert isinstance(model, nn.Module)
    assert evaluated(model) == pytest.approx(events(run, "evaluation")[-1]["metrics"]["loss"], rel=1e-5)
    assert any("extra state of 1 module(s)" in decision["what"] for decision in events(run, "decision"))


def test_the_average_is_what_validation_has_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=3", "train.ema=0.5", "train.precision=float64") == 0
    averaged, raw = (load(run, ema=ema) for ema in (True, False))
    measured = events(run, "evaluation")[-1]["metrics"]["loss"]
    assert evaluated(averaged, torch.float64) == pytest.approx(measured, rel=1e-12)  # type: ignore[arg-type]
    assert evaluated(raw, torch.float64) != pytest.approx(measured, rel=1e-6)  # type: ignore[arg-type]
    said = [decision["what"] for decision in events(run, "decision")]
    assert "validation measures the average of the parameters, with the model's own buffers" in said
    assert "at the end 12% of the average is still the initial values" in said


def test_averages_of_several_models_come_by_name_and_tied(tmp_path: Path) -> None:
    assert start("Gan", tmp_path / "gan", "train.steps=2", "train.ema=0.5") == 0
    raw, averaged = load(tmp_path / "gan"), load(tmp_path / "gan", ema=True)
    assert isinstance(raw, dict) and isinstance(averaged, dict)
    assert not torch.equal(raw["critic"].weight, averaged["critic"].weight)  # type: ignore[arg-type]
    assert start("Tied", tmp_path / "tied", "train.steps=2", "train.ema=0.5") == 0
    tied: Any = load(tmp_path / "tied", ema=True)
    assert tied.again.weight is tied.middle.weight


def test_a_run_without_an_average_has_none_to_give(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2") == 0
    with pytest.raises(CheckpointError, match=r"step-00000002 holds no average of the parameters: it is kept where"):
        load(run, ema=True)


def test_tied_weights_are_tied_and_complex_buffers_stay_complex(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Tied", run, "train.steps=2", "train.precision=float64") == 0
    model: Any = load(str(run))
    assert model.again.weight is model.middle.weight
    assert model.rotation.dtype is model.kept_rotation.dtype is torch.complex64
    assert torch.equal(model.rotation, model.kept_rotation)


def test_several_models_come_by_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Gan", run, "train.steps=2") == 0
    models = load(run)
    assert isinstance(models, dict) and set(models) == {"maker", "critic"}
    assert not any(model.training for model in models.values())
    bare = load(run / "checkpoints" / "step-00000002", task=f"{TASKS}:Gan")
    assert isinstance(bare, dict)
    for name, model in models.items():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), bare[name].parameters(), strict=True))


def test_which_task_makes_the_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2", "task.width=4") == 0
    checkpoint = run / "checkpoints" / "step-00000002"
    with pytest.raises(TaskError, match="names no code: say load"):
        load(checkpoint)
    by_class = load(checkpoint, task=Curve(width=4))
    by_spec = load(run, task=f"{TASKS}:Curve")
    assert isinstance(by_class, nn.Module) and isinstance(by_spec, nn.Module)
    assert evaluated(by_class) == evaluated(by_spec)
    for path, task in ((checkpoint, f"{TASKS}:Curve"), (run, Curve(width=5)), (run, f"{TASKS}:Tied")):
        with pytest.raises(TaskError, match="holds another model than model"):
            load(path, task=task)


def test_where_there_is_nothing_to_load(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2") == 0
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        load(run)
    for nothing in (tmp_path / "nowhere", tmp_path, run / "checkpoints"):
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            load(nothing)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RunError):
        load(tmp_path)


def test_an_older_checkpoint_is_never_taken_silently(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2", "checkpoint.every=1") == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = load(run)
    damage(run, 2)
    with pytest.warns(UserWarning, match="step-00000001 is loaded, not the newest.*step-00000002"):
        older = load(run)
    assert isinstance(newest, nn.Module) and isinstance(older, nn.Module)
    assert evaluated(newest) != evaluated(older)
    damage(run, 1)
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        load(run)


def test_what_is_loaded_stays_from_when_it_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = tmp_path / "run", list[Path]()
    assert start("Curve", run, "train.steps=3") == 0
    real = load_module.task_of_run

    def look(run: Run) -> Any:
        (path,) = (run.checkpoints / f"step-{step:08d}" for step in saved(run.path))
        assert unless_read(path, lambda path: pytest.fail(f"{path} is read")) is None
        seen.append(path)
        return real(run)

    monkeypatch.setattr(load_module, "task_of_run", look)
    load(run)
    assert seen


def test_loading_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=1") == 0
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load(run)
    assert torch.equal(torch.rand(1), expected)


def test_the_text_of_the_config_goes_to_a_task_that_takes_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("WithText", run, "train.steps=1", f"data.text={tmp_path}/*.txt") == 0
    task = task_of_run(Run.open(run))
    assert task.settings["text"] == f"{tmp_path}/*.txt"
    assert make_task(f"{TASKS}:WithText", Run.open(run).config()).settings == task.settings
    with pytest.raises(ConfigError, match="no setting `text"):
        make_task(f"{TASKS}:Curve", Run.open(run).config())


def test_what_is_loaded_or_resumed_from_stays_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = tmp_path / "run", list[str]()
    assert start("Curve", run, "train.steps=3") == 0
    for module, name in ((load_module, "read_model_values"), (snapshot_module, "restore")):
        real = getattr(module, name)

        def look(checkpoint: Checkpoint, *more: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            assert unless_read(checkpoint.path, lambda path: pytest.fail(f"{path} is read")) is None
            seen.append(name)
            return real(checkpoint, *more, **options)

        monkeypatch.setattr(module, name, look)
    load(run)
    assert train(None, "train.steps=4", resume=run) == 0
    assert seen[:2] == ["read_model_values", "restore"]
