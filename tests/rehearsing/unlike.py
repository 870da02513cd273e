"""Tasks whose stages begin unlike one another: with other shapes, other types, or another number of tensors."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from allranks.losses import cross_entropy
from allranks.task import Hints, Task

CLASSES = 5


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Pyramid(Task):
    """Images through convolutions, each of which halves them and doubles their channels."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 8}

    levels: int = 4
    channels: int = 8
    side: int = 64

    def model(self) -> nn.Module:
        widths = [self.channels << level for level in range(self.levels + 1)]
        levels = [nn.Sequential(nn.Conv2d(a, b, 2, stride=2), nn.ReLU()) for a, b in pairwise(widths)]
        end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))
        return nn.Sequential(nn.Conv2d(3, self.channels, 1), *levels, end)

    def hints(self) -> Hints:
        return Hints(blocks=tuple(str(level + 1) for level in range(self.levels)))

    def dataset(self, split: str) -> Any:
        images = _numbers(32, 3, self.side, self.side)
        return [{"x": image, "y": number % CLASSES} for number, image in enumerate(images)]

    def inputs(self, batch: Any) -> Any:
        return (batch["x"],)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output, batch["y"], reduction="sum")


class Layer(nn.Module):
    """Reads what it is given, and what another part of the model has made."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.query, self.both = nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * hidden)
        self.feed = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden))

    def forward(self, value: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norm(value)
        key, read = self.both(normed if memory is None else memory).chunk(2, -1)
        weights = (self.query(normed) @ key.transpose(1, 2) / key.shape[-1] ** 0.5).softmax(-1)
        found: torch.Tensor = value + self.feed(weights @ read)
        return found


class Translator(nn.Module):
    """An encoder, and a decoder of which every layer reads what the encoder has made."""

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocab, hidden)
        self.encoder = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.target = nn.Embedding(vocab, hidden)
        self.decoder = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        value = self.target(target)
        for layer in self.decoder:
            value = layer(value, memory)
        found: torch.Tensor = self.head(value)
        return found


class Translation(Task):
    """Long sentences into short ones: what is carried along has another shape than what goes through the layers."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 8}

    vocab: int = 256
    hidden: int = 64
    layers: int = 2
    source: int = 96
    target: int = 32

    def model(self) -> nn.Module:
        return Translator(self.vocab, self.hidden, self.layers)

    def hints(self) -> Hints:
        return Hints(blocks=("encoder.*", "decoder.*"))

    def dataset(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        rows = torch.randint(0, self.vocab, (16, self.source + self.target + 1), generator=draw)
        cut = self.source
        return [{"source": row[:cut], "target": row[cut:-1], "y": row[cut + 1 :]} for row in rows]

    def inputs(self, batch: Any) -> Any:
        return {"source": batch["source"], "target": batch["target"]}

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(output, batch["y"])


class Down(nn.Module):
    """Halves what it is given, and keeps it for the block that doubles it again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, 2 * width)

    def forward(self, value: torch.Tensor, kept: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        halved = torch.relu(self.linear(value.unflatten(1, (-1, 2)).flatten(2)))
        return halved, [*kept, value]


class Up(nn.Module):
    """Doubles what it is given, and adds what was kept last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, 2 * width)

    def forward(self, value: torch.Tensor, kept: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        *others, last = kept
        doubled = self.linear(value).unflatten(2, (2, -1)).flatten(1, 2)
        return torch.relu(doubled) + last, others


class Skipping(nn.Module):
    """Down and up again, past what is kept for each way up: as many tensors begin a block as are kept, and one."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.down = nn.ModuleList(Down(width << level) for level in range(depth))
        self.up = nn.ModuleList(Up(width << level) for level in reversed(range(depth)))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, kept = self.first(x), list[torch.Tensor]()
        for block in (*self.down, *self.up):
            value, kept = block(value, kept)
        found: torch.Tensor = self.last(value.mean(1))
        return found


class Hourglass(Task):
    """Signals through a model whose skip connections are carried along from stage to stage."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 8}

    width: int = 16
    depth: int = 2
    length: int = 256

    def model(self) -> nn.Module:
        return Skipping(self.width, self.depth)

    def hints(self) -> Hints:
        return Hints(blocks=("down.*", "up.*"))

    def dataset(self, split: str) -> Any:
        signals = _numbers(16, self.length, 4)
        return [{"x": signal, "y": number % CLASSES} for number, signal in enumerate(signals)]

    def inputs(self, batch: Any) -> Any:
        return (batch["x"],)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output, batch["y"], reduction="sum")
