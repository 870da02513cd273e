"""How the scripts of the migration pages are run, and what those before were seen to train.

The scripts differ from the pages' in two things: float64, and samples in the order of the dataset, which two different
ways of shuffling cannot share.

What a script before leads to is kept in `before/`, for machines that have no accelerate or lightning; anew with

    python -m tests.examples.migrating FOLDER

where FOLDER is empty and they are installed.
"""

import hashlib
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.examples.commands import run
from tools.migrations import MIGRATIONS, ROOT

KEPT = Path(__file__).parent / "before"
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


def in_float64(script: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return PROLOGUE + script


def weights_before(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = [path for path in (folder / "model.pt", folder / "trained" / "model.safetensors") if path.exists()]
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def accuracies(printed: str) -> set[float]:
    """The accuracy on new samples that a script or `--json` says; nothing where there is none."""
    return set(map(float, re.findall(r"accuracy\"?:? (\d\.\d+)", printed)))


@dataclass(frozen=True)
class Trained:
    """What a script led to.

    Attributes:
        weights: by name.
        accuracies: that it printed.
    """

    weights: dict[str, torch.Tensor]
    accuracies: set[float]


def script_before(page: str) -> str:
    """The page's script before."""
    return (ROOT / "examples/migrate" / MIGRATIONS[page] / "before.py").read_text()


def can_run_before(page: str) -> bool:
    """Whether what the script before imports is installed."""
    return importlib.util.find_spec(CASES[page].needs) is not None


def run_before(page: str, folder: Path) -> Trained:
    """Run the page's script before in `folder`, which is made."""
    prepare(folder)
    (folder / "train.py").write_text(in_float64(script_before(page), CASES[page].was))
    printed = run(*CASES[page].before, "train.py", folder=folder)
    return Trained(weights_before(folder), accuracies(printed))


def prepare(folder: Path) -> None:
    """Make `folder`, with the text that one of the scripts reads."""
    folder.mkdir()
    (folder / "notes.txt").write_text("it was a dark and stormy night; " * 400)


def kept_before(page: str) -> Trained:
    """What it led to with the version that the file names."""
    path = KEPT / f"{page}.safetensors"
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    assert said["script"] == digest_of(page), f"{path.name} is of another script before: make it anew (see above)"
    return Trained(load_file(path), set(json.loads(said["accuracies"])))


def digest_of(page: str) -> str:
    """Of the script before as it is run."""
    return hashlib.sha256(in_float64(script_before(page), CASES[page].was).encode()).hexdigest()


def _keep(folder: Path) -> None:
    for page in (page for page, case in CASES.items() if case.needs != "torch"):
        found = run_before(page, folder / page)
        made = ", ".join(f"{name} {version(name)}" for name in dict.fromkeys((CASES[page].needs, "torch")))
        said = {"made_with": made, "accuracies": json.dumps(sorted(found.accuracies)), "script": digest_of(page)}
        save_file(found.weights, KEPT / f"{page}.safetensors", said)
        print(f"{page}: {len(found.weights)} tensors, {made}")


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
