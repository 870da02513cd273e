"""The migration pages: each diff applies, and what it leads to trains as what it started from.

The scripts differ from the pages' in two things: float64, and samples in the order of the dataset, which two different
ways of shuffling cannot share.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from allranks.run import Run
from tests.examples.commands import run
from tools.migrations import MIGRATIONS, ROOT

LOCAL = ("--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
TORCHRUN = ("-m", "torch.distributed.run", *LOCAL)
TASK = ("-m", "allranks", "train", "--nproc", "2", "--layout", "ddp", "train.precision=float64", "--json")

PROLOGUE = '''
import os, torch
os.environ["ACCELERATE_USE_CPU"] = "true"  # else it does not see the processes of torchrun
torch.set_default_dtype(torch.float64)

RANK = int(os.environ.get("LOCAL_RANK", "0"))

class InOrder(torch.utils.data.IterableDataset):
    """The rows of some tensors, or of a dataset, one after another."""
    order = "global"
    def __init__(self, *parts):
        self.parts = parts
    def __len__(self):
        return len(self.parts[0])
    def __iter__(self):
        rows = (tuple(part[index] for part in self.parts) for index in range(len(self)))
        return rows if len(self.parts) > 1 else (row[0] for row in rows)

'''
IN_ORDER = ("return TensorDataset(", "return InOrder(")
UNSHUFFLED = ("shuffle=True", "shuffle=False")


@dataclass(frozen=True)
class Migration:
    """How the two scripts of a page are run.

    Attributes:
        before, after: the program that is given the script.
        steps: that both make.
        was, becomes: (text, its replacement) in the script before and after.
        needs: what the script before imports, or needs without importing it.
        tolerance: of the parameters; transformers computes a causal loss in float32.
        tied: names that only the script after writes, of tensors that have another one.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    steps: int
    was: tuple[tuple[str, str], ...]
    becomes: tuple[tuple[str, str], ...]
    needs: str = "torch"
    tolerance: float = 1e-10
    tied: frozenset[str] = frozenset()


LOOP = (UNSHUFFLED, ("seed=0)", 'seed=0, precision="float64")'))
NO_DROPOUT = ("n_head=2)", "n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)")
SEQUENTIAL = ('report_to="none"', 'report_to="none", train_sampling_strategy="sequential"')
GIVEN_IN_ORDER = ('return Windows("notes.txt", seq=64)', 'return InOrder(Windows("notes.txt", seq=64))')

# Lightning shuffles what is trained on whatever the DataLoader says, unless it is told to leave samplers alone.
OWN_SAMPLER = (
    ("shuffle=True)", "sampler=torch.utils.data.DistributedSampler(range(2048), 2, RANK, shuffle=False))"),
    ('strategy="ddp"', 'strategy="ddp", use_distributed_sampler=False'),
)

CASES = {
    "migrate-from-ddp-script": Migration(TORCHRUN, TORCHRUN, 192, (UNSHUFFLED,), LOOP),
    "migrate-from-accelerate": Migration(TORCHRUN, TORCHRUN, 96, (UNSHUFFLED,), LOOP, "accelerate"),
    "migrate-from-lightning": Migration((), TASK, 96, OWN_SAMPLER, (IN_ORDER,), "lightning"),
    "migrate-from-hf-trainer": Migration(
        TORCHRUN,
        TASK,
        20,
        (NO_DROPOUT, SEQUENTIAL),
        (NO_DROPOUT, GIVEN_IN_ORDER),
        "accelerate",
        1e-6,
        frozenset({"lm_head.weight"}),
    ),
    "migrate-from-data-parallel": Migration((), TASK, 192, (UNSHUFFLED, IN_ORDER), (IN_ORDER,)),
}


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


def in_float64(script: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return PROLOGUE + script


def weights_before(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = [path for path in (folder / "model.pt", folder / "trained" / "model.safetensors") if path.exists()]
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def weights_after(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    (directory,) = (folder / "runs").iterdir()
    assert [entry["step"] for entry in Run.open(directory).steps()] == list(range(1, steps + 1))
    run("-m", "allranks", "checkpoint", "export", str(directory), "exported.safetensors", folder=folder)
    return load_file(folder / "exported.safetensors")


def accuracies(printed: str) -> set[float]:
    """The accuracy on new samples that a script or `--json` says; nothing where there is none."""
    return set(map(float, re.findall(r"accuracy\"?:? (\d\.\d+)", printed)))


def test_every_page_is_run() -> None:
    pages = {path.stem for path in (ROOT / "docs/how-to").glob("migrate-from-*.md")}
    assert pages == set(MIGRATIONS) == set(CASES)
    assert {path.name for path in (ROOT / "examples/migrate").iterdir()} == set(MIGRATIONS.values())


@pytest.mark.parametrize("page", CASES)
def test_the_diff_applies(page: str) -> None:
    scripts = ROOT / "examples/migrate" / MIGRATIONS[page]
    assert apply(read_diff(page), (scripts / "before.py").read_text()) == (scripts / "after.py").read_text()


SHORT = "migrate-from-ddp-script"
RUN = [page if page == SHORT else pytest.param(page, marks=pytest.mark.full) for page in CASES]


@pytest.mark.distributed
@pytest.mark.parametrize("page", RUN)
def test_both_scripts_train_the_same(page: str, tmp_path: Path) -> None:
    case, before = CASES[page], (ROOT / "examples/migrate" / MIGRATIONS[page] / "before.py").read_text()
    after = apply(read_diff(page), before)
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("it was a dark and stormy night; " * 400)
    (tmp_path / "after" / "train.py").write_text(in_float64(after, case.becomes))
    printed = run(*case.after, "train.py", folder=tmp_path / "after")
    trained = weights_after(tmp_path / "after", case.steps)
    assert all(tensor.dtype == torch.float64 for tensor in trained.values())
    if importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed: the script after was run, and not compared")
    (tmp_path / "before" / "train.py").write_text(in_float64(before, case.was))
    assert accuracies(run(*case.before, "train.py", folder=tmp_path / "before")) == accuracies(printed)
    expected = weights_before(tmp_path / "before")
    assert trained.keys() - expected.keys() == case.tied
    torch.testing.assert_close({name: trained[name] for name in expected}, expected, rtol=0, atol=case.tolerance)


def test_a_diff_of_another_script_is_seen() -> None:
    page = next(iter(CASES))
    with pytest.raises(AssertionError):
        apply(read_diff(page), "import torch\n")
