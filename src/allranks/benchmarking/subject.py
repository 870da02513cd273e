"""What both sides train: a Transformer of ten million parameters on fixed random tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from allranks.benchmarking.strategies import MICRO_STEPS
from allranks.config import Config, resolve_config
from allranks.layout import Layout
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.task import Task

VOCABULARY = 256
SAMPLES_A_RANK = 2
NUM_ROWS = 64
MAX_NORM = 1.0
LR = 3e-4


@dataclass(frozen=True, slots=True)
class Size:
    """How large a Transformer is, and how long its samples are.

    Attributes:
        expert: the width of an expert, where the model is a mixture of NUM_EXPERTS: about as large as the dense one.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    expert: int


SIZES = {
    "10m": Size(layers=6, hidden=384, heads=8, seq=128, expert=128),
    "tiny": Size(layers=4, hidden=32, heads=4, seq=16, expert=16),
}
NUM_EXPERTS, TOP_K = 8, 2


def samples_a_step(layout: Layout) -> int:
    """The global batch: SAMPLES_A_RANK on each data-parallel rank in each of the micro-steps that a pipeline needs."""
    return SAMPLES_A_RANK * layout.dp * (MICRO_STEPS if layout.pp > 1 else 1)


def make_model(size: str) -> Transformer:
    """The model, from the generator as it stands."""
    wanted = SIZES[size]
    return Transformer(VOCABULARY, wanted.layers, wanted.hidden, wanted.heads, max_seq=wanted.seq, tied=False)


def make_moe(size: str) -> MoETransformer:
    """The one whose feed-forwards are experts, which layouts with ep train."""
    wanted = SIZES[size]
    experts = NUM_EXPERTS, TOP_K, wanted.expert
    return MoETransformer(
        VOCABULARY, wanted.layers, wanted.hidden, wanted.heads, *experts, max_seq=wanted.seq, tied=False
    )


class Tokens(Dataset[dict[str, Tensor]]):
    """`length` samples of fixed random tokens: {"x": [seq], "y": [seq]}."""

    draws = False

    def __init__(self, seq: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1234)
        self._rows = torch.randint(0, VOCABULARY, (NUM_ROWS, seq + 1), generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index % NUM_ROWS]
        return {"x": row[:-1], "y": row[1:]}


class Subject(Task):
    """The model and its data as a Task."""

    size: str = "10m"
    samples: int = 4096
    experts: bool = False
    defaults: ClassVar[dict[str, object]] = {"optimizer.lr": LR, "train.max_norm": MAX_NORM, "evaluate.every": 0}

    def model(self) -> Transformer | MoETransformer:
        """The Transformer."""
        return make_moe(self.size) if self.experts else make_model(self.size)

    def dataset(self, split: str) -> Tokens | None:
        """Random tokens to train on."""
        return Tokens(SIZES[self.size].seq, self.samples) if split == "train" else None

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Nats, summed over the tokens."""
        return functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")


def make_config(layout: Layout, steps: int) -> Config:
    """The config of `steps` steps under `layout`, of `samples_a_step` each."""
    overrides = [f"train.steps={steps}", f"train.global_batch={samples_a_step(layout)}"]
    overrides += [f"train.micro_steps={MICRO_STEPS}"] if layout.pp > 1 else []
    return resolve_config(task_defaults=Subject.defaults, toml=None, overrides=overrides)
