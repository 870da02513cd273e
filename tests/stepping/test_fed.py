"""What a micro-step was fed, in the error that it meets."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from allranks.data.micro_step import MicroStep
from allranks.errors import TaskError
from allranks.stepping.fed import fed
from tests.commands import allranks

WORDS = """
import torch
import allranks
class Words(allranks.Task):
    def dataset(self, split):
        return [(torch.full((8,), i if i == 37 else i % 30), torch.full((8,), i % 30)) for i in range(64)]
    def model(self):
        return torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30))
    def loss(self, output, batch):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
"""


def micro_step(*samples: int) -> MicroStep:
    """A micro-step of these samples, at position 30 and behind it; of none: a filler."""
    positions = np.arange(30, 30 + len(samples))
    return MicroStep(None, int(bool(samples)), 0, 0, positions, np.array(samples, dtype=np.int64))


def notes(error: Exception, step: MicroStep) -> list[str]:
    with pytest.raises(type(error)) as caught, fed(step):
        raise error
    assert caught.value is error
    return getattr(error, "__notes__", [])


def test_the_samples_are_told() -> None:
    assert notes(ValueError("x"), micro_step(7, 3)) == ["allranks: in a forward of samples 7, 3 (positions 30 to 31)"]
    many = notes(ValueError("x"), micro_step(*range(20)))
    assert many == ["allranks: in a forward of samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more (positions 30 to 49)"]
    assert notes(ValueError("x"), micro_step()) == [], "a filler has none of its own"
    assert notes(IndexError("list index out of range"), micro_step(7)) == [
        "allranks: in a forward of samples 7 (positions 30 to 30)"
    ]


def test_what_allranks_says_itself_has_no_note() -> None:
    assert notes(TaskError("no"), micro_step(7)) == []


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([[0, 1], [2, 9]], "sample 3 asks for row 9 of an embedding that has rows 0 to 8"),
        ([[0, -1], [2, 3]], "sample 7 asks for row -1 of an embedding that has rows 0 to 8"),
        ([[0], [2], [11]], "one of them asks for row 11 of an embedding that has rows 0 to 8"),
        (70_000, "one of them asks for row 70000 of an embedding that has rows 0 to 8"),
    ],
    ids=["too large", "below 0", "other rows than samples", "no row at all"],
)
@pytest.mark.parametrize("module", [True, False])
def test_a_row_that_a_table_lacks_is_told_with_whose_it_is(indices: list[list[int]], said: str, module: bool) -> None:
    table = torch.nn.Embedding(9, 4)
    with pytest.raises(IndexError) as caught, fed(micro_step(7, 3)):
        table(torch.tensor(indices)) if module else F.embedding(torch.tensor(indices), table.weight)
    assert caught.value.__notes__[1:] == [f"allranks: {said}"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.full), pytest.param("pp=2", marks=pytest.mark.full)]
)
def test_a_token_outside_of_the_vocabulary_is_told_last_with_its_sample(tmp_path: Path, layout: str) -> None:
    (tmp_path / "task.py").write_text(WORDS)
    words = ("--nproc", "2", "--layout", layout, "--run", "run", "train.global_batch=8", "train.steps=20")
    ran = allranks("train", "task.py", *words, folder=tmp_path, check=1)
    fed_samples, asked, error = ran.stderr.strip().splitlines()[-3:]
    assert error == "IndexError: index out of range in self"
    assert fed_samples.startswith("allranks: in a forward of samples ") and "37" in fed_samples
    assert asked == "allranks: sample 37 asks for row 37 of an embedding that has rows 0 to 29"
