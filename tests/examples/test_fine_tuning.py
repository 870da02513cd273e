"""examples/fine_tuning learns by its corrections alone, whatever the layout, on top of what another run has learnt."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import allranks
from allranks.task import load_task
from tests.examples.commands import EXAMPLES, run, train

pytestmark = pytest.mark.distributed

DIGITS, FINE_TUNING = (str(EXAMPLES / name / "task.py") for name in ("digits", "fine_tuning"))


def losses_under(layout: str, nproc: int, folder: Path) -> list[float]:
    """The losses of a short run on top of `base`, in float64."""
    (folder / layout).mkdir()
    settings = ("train.precision=float64", "train.epochs=8", f"task.base={folder / 'base' / 'run'}")
    events = train(FINE_TUNING, "--layout", layout, "--nproc", str(nproc), *settings, folder=folder / layout)
    return [event["loss"] for event in events if event["event"] == "step"]


def accuracy(model: nn.Module, task: allranks.Task) -> float:
    """Of a plain loop over the validation images."""
    images, labels = task.dataset("validation").tensors
    dtype = next(model.parameters()).dtype
    found: torch.Tensor = (model(images.to(dtype)).argmax(dim=1) == labels).double().mean()
    return found.item()


@pytest.mark.full
@pytest.mark.parametrize(("layout", "nproc"), [("fsdp", 2), ("ddp", 3)])
def test_what_another_run_has_learnt_stays_and_the_corrections_learn(tmp_path: Path, layout: str, nproc: int) -> None:
    (tmp_path / "base").mkdir()
    train(DIGITS, "--layout", "single", "train.epochs=5", folder=tmp_path / "base")
    assert losses_under("single", 1, tmp_path) == pytest.approx(losses_under(layout, nproc, tmp_path), rel=1e-9)

    base, tuned = (allranks.load(tmp_path / name / "run") for name in ("base", layout))
    assert isinstance(base, nn.Module) and isinstance(tuned, nn.Module)
    kept = {name.replace(".layer", ""): value for name, value in tuned.state_dict().items() if ".layer." in name}
    assert kept.keys() == base.state_dict().keys()
    assert all(torch.equal(value, base.state_dict()[name].double()) for name, value in kept.items())
    sideways = load_task(FINE_TUNING, {"base": str(tmp_path / "base" / "run")})
    assert accuracy(base, sideways) < 0.4 < 0.8 < accuracy(tuned, sideways)

    globs = ("--only", "*.down.weight", "--only", "*.up.weight")
    run("-m", "allranks", "checkpoint", "export", "run", "learnt.safetensors", *globs, folder=tmp_path / layout)
    learnt = load_file(tmp_path / layout / "learnt.safetensors")
    assert learnt.keys() == {name for name, value in sideways.model().named_parameters() if value.requires_grad}  # type: ignore[union-attr]


@pytest.mark.full
def test_without_the_other_run_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"runs/digits"):
        train(FINE_TUNING, "--layout", "single", folder=tmp_path)
