"""The models of law 4's matrix, each over words of a sequence, so that every axis of a layout has what it cuts.

Sizes are odd where they may be; heads, words and blocks divide by 2, 3 and 4, which the axes that cut them need.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from allranks.hints import Hints, TensorStyle
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from tests.distributed.tasks import IGNORED, NUM_SAMPLES, WIDTH, Block, Encoder, Tiny, scalar_gain, vector_gain

WORDS, VOCABULARY, BLOCKS = 24, 11, 4
MARK = 20.0


class Sentences(torch.utils.data.Dataset[Any]):
    """x: 24 words of 11, y: the words to be found, 8 to 24 of them; in some samples none of the first half.

    Word 0 is in every second sample only.
    """

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randint(0, VOCABULARY, (2, WORDS), generator=generator)
        x.clamp_(min=index % 2)
        y[: 4 * (index % 5)] = IGNORED
        return {"x": x, "y": y}


class Stack(nn.Module):
    """Words through blocks of one kind."""

    def __init__(self, blocks: list[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(WIDTH))  # the model's own: no block's
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) + self.bias
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(hidden * self.bias)
        return found


class ConvBlock(nn.Module):
    """Each word's values as a signal through two convolutions and BatchNorms of both kinds, one without parameters.

    Rows of the statistics are samples times positions times values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signal = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Tanh())
        self.image = nn.Sequential(nn.Conv2d(3, 1, 1, bias=False), nn.BatchNorm2d(1, affine=False, momentum=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signals = self.signal(x.flatten(0, 1).unsqueeze(1))
        return x + torch.tanh(self.image(signals.unsqueeze(2))).reshape(x.shape)


class CountingBlock(Block):
    """Counts its forwards and what they saw: one buffer changes in place, the other is a new tensor each time."""

    calls: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(vector_gain())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.seen = self.seen + len(x)
        return super().forward(x)


class Crossed(nn.Module):
    """Two streams through one layer, beside one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, left: torch.Tensor, *, other: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> Any:
        return left + torch.tanh(self.linear(other)) * mask, other - torch.tanh(self.linear(left + memory))


class Streams(nn.Module):
    """Blocks that take and give two tensors, by keyword, beside those that a frozen layer makes for all of them.

    That is one of numbers and a mask; the output is a dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Crossed() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        memory = self.frozen(x)
        mask = (x > 2).unsqueeze(-1) & (memory[..., :1] > 0)
        left = self.embedding(x)
        right = torch.tanh(left)
        for block in self.blocks:
            left, right = block(left, other=right, memory=memory, mask=mask)
        return {"logits": self.head(left + right)}


class BranchingBlock(Block):
    """Has a layer for one word only, which many a micro-step of a rank does not hold."""

    def __init__(self) -> None:
        super().__init__(vector_gain())
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        rare = hidden[..., :1] > MARK / 2
        return hidden + self.rare(hidden) * rare if rare.any() else hidden


def branching() -> nn.Module:
    """Word 0 is told from the others by its first value."""
    model = Stack([BranchingBlock() for _ in range(BLOCKS)])
    with torch.no_grad():
        model.embedding.weight[0, 0] = MARK
    return model


def mlp(first: nn.Module | None = None, last: int = VOCABULARY) -> nn.Module:
    """A plain stack of equal layers, of words unless `first` takes something else."""
    layers = [layer for _ in range(BLOCKS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(first or nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, last))


def with_scalars() -> nn.Module:
    """Blocks with parameters without dims; the first and the last share one."""
    gains = [scalar_gain() for _ in range(BLOCKS - 1)]
    return Stack([Block(gain) for gain in (*gains, gains[0])])


def frozen() -> nn.Module:
    """Frozen layers and scalars, so that a first stage has nothing to learn, and a parameter of integers."""
    model = Stack([Block(scalar_gain()) for _ in range(BLOCKS)])
    for part in (model.embedding, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    model.register_parameter("steps", nn.Parameter(torch.arange(5), requires_grad=False))
    return model


def sharing() -> nn.Module:
    """The first and the last block share their linear layer."""
    shared = nn.Linear(WIDTH, WIDTH)
    between = [Block(vector_gain()) for _ in range(BLOCKS - 2)]
    return Stack([Block(vector_gain(), shared), *between, Block(vector_gain(), shared)])


MODELS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: Transformer(VOCABULARY, BLOCKS, 48, 24, ffn=12, max_seq=WORDS, num_kv_heads=12),
    "moe": lambda: MoETransformer(
        VOCABULARY, BLOCKS, 48, 24, num_experts=4, top_k=2, ffn=5, max_seq=WORDS, num_kv_heads=12, rate=0.01
    ),
    "encoder": lambda: Encoder(num_layers=BLOCKS),
    "mlp": mlp,
    "batchnorm": lambda: Stack([ConvBlock() for _ in range(BLOCKS)]),
    "tied": lambda: Stack([Block(vector_gain()) for _ in range(BLOCKS)], tied=True),
    "frozen": frozen,
    "scalars": with_scalars,
    "sharing": sharing,
    "counted": lambda: Stack([CountingBlock() for _ in range(BLOCKS)]),
    "streams": Streams,
    "branching": branching,
    "gan": lambda: {
        "maker": mlp(),
        "critic": mlp(nn.Linear(VOCABULARY, WIDTH), last=1),
        "frozen": nn.Embedding(VOCABULARY, VOCABULARY).requires_grad_(False),
    },
}
BY_BLOCK: dict[str, TensorStyle] = {"blocks.*.linear": "vocab"}
# Where tensor parallelism finds nothing to cut by itself.
TENSOR: dict[str, dict[str, TensorStyle]] = {
    **dict.fromkeys(("frozen", "scalars", "sharing", "counted", "streams", "branching"), BY_BLOCK),
    "tied": {"embedding": "vocab", "head": "vocab"},
    "batchnorm": {"head": "vocab"},
}


class Sentence(Tiny):
    """One of MODELS on Sentences; the pair of a GAN takes turns."""

    kind: str = "transformer"

    def model(self) -> Any:
        return MODELS[self.kind]()

    def dataset(self, split: str) -> Any:
        return Sentences()

    def hints(self) -> Hints:
        optional = ("blocks.*.rare",) if self.kind == "branching" else ()
        return Hints(tensor=TENSOR.get(self.kind, {}), optional=optional)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return super().loss(output["logits"] if isinstance(output, dict) else output, batch)


class Pair(Sentence):
    """A maker of words, made before the critic's update and used again after it."""

    def step(self, models: Any, batch: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
        maker, critic = models["maker"], models["critic"]
        real, targets = models["frozen"](batch["x"]), batch["x"].numel()
        fake = maker(batch["x"])
        told = functional.softplus(-critic(real)) + functional.softplus(critic(fake.detach()))
        yield "critic", told.sum(), targets
        # This one's backward leaves gradients on the critic, too, which no update may see.
        yield "maker", functional.softplus(-critic(fake)).sum(), targets


def update_balance(model: nn.Module) -> None:
    """What the user of a mixture of experts does after each update."""
    if isinstance(model, MoETransformer):
        model.update_balance()


def task_of(model: str) -> Sentence:
    """The Task of a column."""
    return Pair(kind=model) if model == "gan" else Sentence(kind=model)
