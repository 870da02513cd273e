"""The migration pages: each diff applies, and what it leads to trains as what it started from."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from allranks.run import Run
from tests.examples.commands import run
from tests.examples.migrating import (
    CASES,
    Trained,
    accuracies,
    can_run_before,
    in_float64,
    kept_before,
    prepare,
    run_before,
    script_before,
)
from tools.migrations import MIGRATIONS, ROOT


def read_diff(page: str) -> list[str]:
    """The lines of the page's only diff, without its three heading lines."""
    (block,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/how-to" / f"{page}.md").read_text(), re.M | re.S)
    lines: list[str] = block.splitlines()
    assert [line[:3] for line in lines[:3]] == ["---", "+++", "@@ "]
    return lines[3:]


def apply(lines: list[str], script: str) -> str:
    """The script that a diff with every line of it makes of it."""
    assert "".join(line[1:] + "\n" for line in lines if line[:1] != "+") == script
    return "".join(line[1:] + "\n" for line in lines if line[:1] != "-")


def weights_after(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    (directory,) = (folder / "runs").iterdir()
    assert [entry["step"] for entry in Run.open(directory).steps()] == list(range(1, steps + 1))
    run("-m", "allranks", "checkpoint", "export", str(directory), "exported.safetensors", folder=folder)
    return load_file(folder / "exported.safetensors")


def trained_before(page: str, folder: Path) -> Trained:
    """What the script before trains; run once more where torch ended it behind its last line.

    A process group that DDP still holds when the process ends may be destroyed with its thread running: SIGABRT, now
    and then, also of a script that has called `destroy_process_group` (github.com/pytorch/pytorch/issues/190489).
    """
    try:
        return run_before(page, folder / "before")
    except AssertionError as error:
        if "terminate called without an active exception" not in str(error):
            raise
    return run_before(page, folder / "again")


def test_every_page_is_run() -> None:
    pages = {path.stem for path in (ROOT / "docs/how-to").glob("migrate-from-*.md")}
    assert pages == set(MIGRATIONS) == set(CASES)
    assert {path.name for path in (ROOT / "examples/migrate").iterdir()} == set(MIGRATIONS.values())


@pytest.mark.parametrize("page", CASES)
def test_the_diff_applies(page: str) -> None:
    scripts = ROOT / "examples/migrate" / MIGRATIONS[page]
    assert apply(read_diff(page), script_before(page)) == (scripts / "after.py").read_text()


SHORT = "migrate-from-lightning"  # the cheapest: what its script before trains is kept
RUN = [page if page == SHORT else pytest.param(page, marks=pytest.mark.full) for page in CASES]


@pytest.mark.distributed
@pytest.mark.parametrize("page", RUN)
def test_both_scripts_train_the_same(page: str, tmp_path: Path) -> None:
    """With what the script before needs, it is run; without, with what it was seen to train (`migrating.py`)."""
    case = CASES[page]
    prepare(tmp_path / "after")
    script = in_float64(apply(read_diff(page), script_before(page)), case.becomes)
    (tmp_path / "after" / "train.py").write_text(script)
    printed = run(*case.after, "train.py", folder=tmp_path / "after")
    trained = weights_after(tmp_path / "after", case.steps)
    assert all(tensor.dtype == torch.float64 for tensor in trained.values())
    before = trained_before(page, tmp_path) if can_run_before(page) else kept_before(page)
    assert before.accuracies == accuracies(printed)
    assert trained.keys() - before.weights.keys() == case.tied
    same = {name: trained[name] for name in before.weights}
    torch.testing.assert_close(same, before.weights, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("page", [page for page, case in CASES.items() if case.needs != "torch"])
def test_what_is_kept_is_of_the_script_before(page: str) -> None:
    assert kept_before(page).weights


def test_a_diff_of_another_script_is_seen() -> None:
    page = next(iter(CASES))
    with pytest.raises(AssertionError):
        apply(read_diff(page), "import torch\n")
