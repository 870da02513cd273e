"""Tasks to profile, one for each thing that a model may hold; sizes are small and odd."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.task import Task

VOCAB, SEQ, WIDTH, CLASSES = 32, 12, 24, 5


class Words(Task):
    """[seq] tokens and the next ones, through the model that `make` names."""

    make: str = "transformer"
    seq: int = SEQ

    def dataset(self, split: str) -> Any:
        tokens = torch.randint(0, VOCAB, (8, self.seq + 1), generator=torch.Generator().manual_seed(0))
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def model(self) -> Any:
        return WORDS[self.make]()

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")


class Images(Task):
    """[3, 8, 8] images and their classes."""

    def dataset(self, split: str) -> Any:
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(images, torch.arange(8) % CLASSES)

    def model(self) -> Any:
        return Convolutions()

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output, batch[1], reduction="sum")


class Vectors(Task):
    """[24] floats and their classes, through the model that `make` names."""

    make: str = "mlp"

    def dataset(self, split: str) -> Any:
        values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
        return TensorDataset(values, torch.arange(8) % CLASSES)

    def model(self) -> Any:
        return VECTORS[self.make]()

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output, batch[1], reduction="sum")


class Adversaries(Vectors):
    """A GAN, with its own step."""

    def model(self) -> Any:
        generator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        return {"generator": generator, "critic": nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))}

    def step(self, models: Any, batch: Any) -> Any:
        real = batch[0]
        made = models["generator"](torch.randn_like(real))
        judged = models["critic"](real).sum() - models["critic"](made.detach()).sum()
        yield "critic", judged, len(real)
        yield "generator", -models["critic"](made).sum(), len(real)


class Convolutions(nn.Module):
    """Two blocks of a convolution and a BatchNorm, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()) for _ in range(2))
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return found


class Encoder(nn.Module):
    """torch's own encoder over words, causal or not."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 40, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.encoder(self.embedding(tokens)))
        return found


class Frozen(nn.Module):
    """Layers that do not learn, before some that do."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.fixed(x))
        return found


@torch.library.custom_op("allranks_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operation of which torch knows no shape."""
    return x * 2


class Asking(nn.Module):
    """Does what needs values: `how` says what."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = AskingPart(how)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.inner(self.first(x)))
        return found


class AskingPart(nn.Module):
    """The part of `Asking` that asks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "item":
            return x * x.detach().abs().max().item()
        if self.how == "branch" and x.sum() > 0:
            return x * 2
        if self.how == "shape":
            return x + x[x > 0].sum()
        if self.how == "custom":
            return torch.add(x, doubled(x.detach()))
        if self.how == "numpy":
            return x + torch.from_numpy(x.detach().float().numpy())
        return x


def mlp(dropout: float = 0.0) -> nn.Module:
    """Equal layers in a row."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


WORDS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: Transformer(VOCAB, 3, WIDTH, 4, 40, max_seq=64, tied=False),
    "tied": lambda: Transformer(VOCAB, 3, WIDTH, 4, 40, max_seq=64, num_kv_heads=2),
    "moe": lambda: MoETransformer(VOCAB, 2, 16, 2, num_experts=4, top_k=2, max_seq=64),
    "encoder": Encoder,
    "dropout": lambda: Encoder(0.1),
}
VECTORS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropout": lambda: mlp(0.2),
    "frozen": Frozen,
    **{how: partial(Asking, how) for how in ("item", "branch", "shape", "numpy", "custom")},
}
