"""Tiny tasks, one for each thing that spreading may break; sizes are odd, so that nothing divides."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from allranks.hints import Hints, TensorStyle
from allranks.models.moe import Experts, MixtureOfExperts, MoETransformer
from allranks.models.transformer import Transformer
from allranks.task import Task

IGNORED = -100
NUM_SAMPLES = 61
WIDTH, CLASSES = 7, 3


class Points(torch.utils.data.Dataset[Any]):
    """x: 5 floats, y: a class; some samples have no target, so that ranks hold unevenly many."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(5, generator=generator)
        return {"x": x, "y": IGNORED if index % 5 == 0 else index % CLASSES}


class Words(torch.utils.data.Dataset[Any]):
    """x: 6 words of 11, y: the words to be found, 2 to 6 of them."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randint(0, 11, (2, 6), generator=generator)
        y[: index % 5] = IGNORED
        return {"x": x, "y": y}


class Block(nn.Module):
    """A residual block with a norm, a bias and a gain; `linear` may be shared with another block."""

    def __init__(self, gain: nn.Parameter, linear: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH) if linear is None else linear
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Points through blocks."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.last(hidden)
        return found


class Counted(nn.Module):
    """An MLP with buffers that training forwards change: one in place, one by putting a new tensor in its place."""

    calls: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.seen = self.seen + len(x)
        found: torch.Tensor = self.inner(x)
        return found


class Tied(nn.Module):
    """Words through two blocks, the embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.Sequential(*(Block(vector_gain()) for _ in range(2)))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.blocks(self.embedding(x)))
        return found


def vector_gain() -> nn.Parameter:
    """A gain for each channel."""
    return nn.Parameter(torch.rand(WIDTH))


def scalar_gain() -> nn.Parameter:
    """A gain without dims, which FSDP2 cannot cut."""
    return nn.Parameter(torch.rand(()))


def mlp() -> nn.Module:
    """A plain stack, whose equal layers are units."""
    layers = [nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def with_scalars() -> nn.Module:
    """Blocks with parameters without dims; the first and the last share one."""
    gains = [scalar_gain(), scalar_gain()]
    return Stack([Block(gains[0]), Block(gains[1]), Block(gains[0])])


def frozen() -> nn.Module:
    """Frozen layers, a frozen scalar, and a parameter of integers."""
    module = Stack([Block(scalar_gain()) for _ in range(3)])
    module.first.requires_grad_(False)
    blocks = list(module.blocks)
    blocks[1].requires_grad_(False)
    module.register_parameter("steps", nn.Parameter(torch.arange(5), requires_grad=False))
    return module


class Convolved(nn.Module):
    """Points as signals of five values through BatchNorms: of both kinds, with and without parameters and memory.

    The last one is frozen. Their rows are samples times values, so that one sample alone has statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv1d(1, WIDTH, 3, padding=1),
            nn.BatchNorm1d(WIDTH),
            nn.Tanh(),
            nn.Conv1d(WIDTH, WIDTH, 3),
            nn.BatchNorm1d(WIDTH, affine=False, momentum=None),
            nn.Tanh(),
            nn.Unflatten(2, (3, 1)),
            nn.Conv2d(WIDTH, WIDTH, 1, bias=False),
            nn.BatchNorm2d(WIDTH, track_running_stats=False),
            nn.BatchNorm2d(WIDTH).eval(),
        )
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.blocks(x.unsqueeze(1))).mean((2, 3))
        found: torch.Tensor = self.last(torch.tanh(self.middle(hidden)))
        return found


def sharing() -> nn.Module:
    """Blocks 0 and 2 share their linear layer, so that they can only be cut together."""
    shared = nn.Linear(WIDTH, WIDTH)
    return Stack([Block(vector_gain(), shared), Block(vector_gain()), Block(vector_gain(), shared)])


def transformer() -> nn.Module:
    """The reference model with grouped queries: of 12 heads and ffn 12, so that 2, 3 and 4 ranks may share them."""
    return Transformer(11, 2, 48, 24, ffn=12, max_seq=6, num_kv_heads=12)


def moe() -> nn.Module:
    """Experts in both layers, a bias that moves far enough to be seen, and heads as the transformer has them."""
    return MoETransformer(11, 2, 48, 24, num_experts=4, top_k=2, ffn=5, max_seq=6, num_kv_heads=12, rate=0.01)


class Encoder(nn.Module):
    """torch's own encoder: attention with packed projections, norms behind the residuals; 12 heads, as above."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, nhead=12, dim_feedforward=12, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(11, 24)
        self.encoder = nn.TransformerEncoder(layer, num_layers=num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(24, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.encoder(self.words(x)))
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "tied": Tied,
    "scalars": with_scalars,
    "frozen": frozen,
    "sharing": sharing,
    "counted": Counted,
    "transformer": transformer,
    "moe": moe,
    "batchnorm": Convolved,
    "encoder": Encoder,
}
OF_WORDS = ("tied", "transformer", "moe", "encoder")

# Where tensor parallelism finds nothing to cut by itself.
TENSOR: dict[str, dict[str, TensorStyle]] = {
    "tied": {"embedding": "vocab", "head": "vocab"},
    "scalars": {"blocks.*.linear": "vocab"},
    "frozen": {"blocks.*.linear": "vocab", "first": "vocab"},
    "sharing": {"blocks.*.linear": "vocab"},
    "batchnorm": {"middle": "vocab"},
}


class Tiny(Task):
    """Cross-entropy of one of MODELS, on Words for some and on Points for the others."""

    kind: str = "mlp"

    def model(self) -> nn.Module:
        return MODELS[self.kind]()

    def dataset(self, split: str) -> Any:
        return Words() if self.kind in OF_WORDS else Points()

    def hints(self) -> Hints:
        return Hints(tensor=TENSOR.get(self.kind, {}))

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="sum")

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        counted = batch["y"] != IGNORED
        return {"accuracy": ((output.argmax(-1) == batch["y"])[counted].sum(), counted.sum())}


class CountingBlock(Block):
    """Counts its forwards in a buffer that it also reads, and drops."""

    calls: torch.Tensor

    def __init__(self, drop: float) -> None:
        super().__init__(vector_gain())
        self.drop = drop
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return functional.dropout(super().forward(x), self.drop, self.training) * (self.calls + 1)


class CountingTask(Tiny):
    """Three of them."""

    drop: float = 0.0

    def model(self) -> nn.Module:
        return Stack([CountingBlock(self.drop) for _ in range(3)])


class Fresh(Experts):
    """A user's own, which returns a new tensor where it is given nothing: no backward comes from there."""

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, tokens_per_expert) if len(tokens) else torch.zeros_like(tokens)


def starved() -> nn.Module:
    """Words through such experts, to the second half of which no token goes."""
    model = moe()
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.experts.__class__ = Fresh
            layer.router.bias[:2] = 5.0
    return model


class StarvedTask(Tiny):
    """Of kind "moe", with those."""

    def model(self) -> nn.Module:
        return starved()
