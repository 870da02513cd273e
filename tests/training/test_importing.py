"""A foreign model becomes a checkpoint of the Task, or every tensor that differs is named."""

from pathlib import Path

import pytest
import torch
from torch import nn

from allranks.checkpointing.checkpoint import Checkpoint, verify_files
from allranks.errors import CheckpointError, TaskError
from allranks.training.importing import Difference, compare_with, write_import
from allranks.training.load import load
from tests.training.tasks import Curve, Gan, Tied


def values_of(task: Curve | Gan) -> dict[str, torch.Tensor]:
    """What another program may have saved of the model."""
    built = task.model()
    modules = {"": built} if isinstance(built, nn.Module) else built
    return {
        f"{which}.{name}" if which else name: torch.full_like(tensor, 0.5)
        for which, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("task", [Curve(), Gan(), Tied()], ids=lambda task: type(task).__name__)
def test_what_fits_comes_back_as_the_tasks_model(tmp_path: Path, task: Curve) -> None:
    fit = compare_with(task, values_of(task))
    assert fit.differences == () and fit.fits(cast=False)
    checkpoint = write_import(fit, tmp_path)
    verify_files(Checkpoint.open(checkpoint.path))
    model = load(checkpoint.path, task)
    modules = model.values() if isinstance(model, dict) else [model]
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    assert tensors and all(torch.all(tensor == 0.5) for tensor in tensors)


def test_every_difference_is_named() -> None:
    found = values_of(Curve())
    names = list(found)
    del found[names[0]]
    found[names[1]] = torch.zeros(3)
    found[names[2]] = found[names[2]].half()
    found["more.weight"] = torch.zeros(1)
    fit = compare_with(Curve(), found)
    kind = f"float32{list(found[names[2]].shape)}"
    missing, reshaped, extra, retyped = fit.differences
    assert (missing.name, missing.what, missing.file) == (names[0], "missing", "") and missing.model
    assert (reshaped.name, reshaped.what, reshaped.file) == (names[1], "reshaped", "float32[3]")
    assert extra == Difference("more.weight", "extra", "float32[1]", "")
    assert retyped == Difference(names[2], "retyped", kind.replace("32", "16"), kind)
    assert not fit.fits(cast=True)


def test_other_types_are_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    fit = compare_with(Curve(), {name: tensor.half() for name, tensor in values_of(Curve()).items()})
    assert not fit.fits(cast=False) and fit.fits(cast=True)
    manifest = write_import(fit, tmp_path).manifest
    assert {record.dtype for record in manifest.tensors.values()} == {"float32"}


def test_what_is_tied_may_stand_in_the_file_once_or_twice_alike(tmp_path: Path) -> None:
    found = values_of(Tied())
    (alias, name), *_ = compare_with(Tied(), found).aliases.items()
    for left_out in (alias, name):
        once = {key: tensor for key, tensor in found.items() if key != left_out}
        assert compare_with(Tied(), once).fits(cast=False)
    (untied,) = compare_with(Tied(), found | {alias: found[alias] + 1}).differences
    assert (untied.name, untied.what) == (alias, "untied")


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    fit = compare_with(Curve(), values_of(Curve()))
    write_import(fit, tmp_path)
    with pytest.raises(CheckpointError, match="exists already, and is left as it is"):
        write_import(fit, tmp_path)


def test_what_a_killed_import_left_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000000.tmp-imported").mkdir()
    (tmp_path / "step-00000000.tmp-imported" / "rank-00000.safetensors").write_bytes(b"half")
    checkpoint = write_import(compare_with(Curve(), values_of(Curve())), tmp_path)
    verify_files(Checkpoint.open(checkpoint.path))
    assert list(tmp_path.iterdir()) == [checkpoint.path]


class Ending(Curve):
    def model(self) -> nn.Module:
        raise SystemExit(0)


def test_a_model_that_cannot_be_made_is_no_model_that_differs() -> None:
    with pytest.raises(TaskError, match=r"(?s)^Ending.model\(\) raised:\n.*test_importing.py.*SystemExit: 0"):
        compare_with(Ending(), {})
