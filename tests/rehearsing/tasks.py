"""Tasks that are small enough to rehearse in a second, sound ones and broken ones."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from allranks.config import Config, resolve_config
from allranks.layout import Layout
from allranks.losses import cross_entropy
from allranks.models.moe import MoETransformer, Router
from allranks.models.transformer import Transformer
from allranks.parallel.batchnorm import Mode
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.task import Hints, Task
from allranks.training.prepare import resolve_layout


class Tokens(Task):
    """A small language model on random tokens."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 8, "train.max_norm": 1.0}

    layers: int = 3
    hidden: int = 64
    seq: int = 32
    vocab: int = 256
    chunk: int = 0

    def model(self) -> nn.Module:
        sizes: Any = {"ffn": 4 * self.hidden, "max_seq": self.seq, "tied": False, "chunk": self.chunk or None}
        return Transformer(self.vocab, self.layers, self.hidden, 4, **sizes)

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        data = torch.randint(0, self.vocab, (64, self.seq + 1), generator=torch.Generator().manual_seed(0))
        return [{"tokens": row[:-1], "y": row[1:]} for row in data]

    def inputs(self, batch: Any) -> Any:
        return {"tokens": batch["tokens"], **({"targets": batch["y"]} if self.chunk else {})}

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return output.sum() if self.chunk else cross_entropy(output, batch["y"])

    def hints(self) -> Hints:
        plan: Any = Transformer.tensor_plan
        return Hints(blocks=("layers.*",), tensor=plan)


class CutLoss(Tokens):
    """The same, whose logits stay cut until the loss."""

    def hints(self) -> Hints:
        return replace(super().hints(), loss_parallel=True)


class Restored(Task):
    """An output as large as every activation, and a squared error, which keeps no copy of it."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 128}

    layers: int = 3
    width: int = 128
    given: int = 4
    seq: int = 512

    def model(self) -> nn.Module:
        parts = [nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)]
        return nn.Sequential(nn.Linear(self.given, self.width), *parts, nn.Linear(self.width, self.width))

    def dataset(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        x, y = (torch.randn(self.seq, width, generator=draw) for width in (self.given, self.width))
        return [{"x": x, "y": y}] * 128 if split == "train" else None

    def inputs(self, batch: Any) -> Any:
        return (batch["x"],)

    def targets(self, batch: Any) -> int:
        return int(batch["y"].shape[0])

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch["y"], reduction="sum")


class Experts(Tokens):
    """The same with experts."""

    def model(self) -> nn.Module:
        sizes: Any = {"ffn": 2 * self.hidden, "max_seq": self.seq, "tied": False}
        return MoETransformer(self.vocab, self.layers, self.hidden, 4, 4, 2, **sizes)

    def hints(self) -> Hints:
        plan: Any = MoETransformer.tensor_plan
        return Hints(blocks=("layers.*",), tensor=plan)


class InTurn(Router):
    """Chooses the experts in turn: as many tokens for each."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.score(tokens).sigmoid()
        first = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        chosen = (first + torch.arange(self.top_k, device=tokens.device)) % len(self.bias)
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)


class EvenExperts(Experts):
    """Its experts all get the same number of tokens."""

    def model(self) -> nn.Module:
        model = super().model()
        blocks: Any = model.layers
        for block in blocks:
            block.feed_forward.router = InTurn(self.hidden, 4, 2)
        return model


class Adversaries(Task):
    """Two models that train against each other, by a step of its own."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 64}

    width: int = 256
    given: int = 64

    def model(self) -> Any:
        ends = {"generator": (16, self.given), "critic": (self.given, 1)}
        return {
            name: nn.Sequential(nn.Linear(first, self.width), nn.ReLU(), nn.Linear(self.width, last))
            for name, (first, last) in ends.items()
        }

    def dataset(self, split: str) -> Any:
        return torch.randn(256, self.given, generator=torch.Generator().manual_seed(0)) if split == "train" else None

    def optimizer(self, parameters: Any) -> Any:
        return {name: torch.optim.Adam(parameters[name]) for name in ("critic", "generator")}

    def step(self, models: Any, batch: Any) -> Any:
        """First the critic's loss, then the generator's, which leaves gradients on both."""
        drawn = models["generator"](torch.randn(len(batch), 16, device=batch.device))
        critic = models["critic"]
        yield "critic", (functional.softplus(-critic(batch)) + functional.softplus(critic(drawn.detach()))).sum(), 1
        yield "generator", functional.softplus(-critic(drawn)).sum(), 1


class Gathering(Adversaries):
    """Its critic compares the drawn rows of all ranks."""

    coupled = True

    def step(self, models: Any, batch: Any) -> Any:
        """One loss, of both."""
        drawn = self.world.gather(models["generator"](torch.randn(len(batch), 16, device=batch.device)))
        yield "generator", functional.softplus(-models["critic"](drawn)).sum(), len(batch)
        yield "critic", functional.softplus(models["critic"](batch)).sum(), len(batch)


class Stepping(Tokens):
    """One model whose step is its own, of two losses."""

    def step(self, model: Any, batch: Any) -> Any:
        """The same loss twice."""
        for _ in range(2):
            yield "", cross_entropy(model(batch["tokens"]), batch["y"]), batch["y"].numel()


class Normed(Task):
    """Layers with BatchNorm, whose statistics a forward changes; and a table, which none does."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 16}

    width: int = 2048
    batchnorm: Mode | None = None

    def model(self) -> nn.Module:
        ends = ((32, self.width), (self.width, 16), (16, self.width))
        parts = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in ends]
        model = nn.Sequential(*parts, nn.Linear(self.width, 10))
        model.register_buffer("table", torch.zeros(32, self.width))
        return model

    def dataset(self, split: str) -> Any:
        data = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        return [(row, 3) for row in data] if split == "train" else None

    def hints(self) -> Hints:
        return Hints(batchnorm=self.batchnorm)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


class Layered(Task):
    """A stack of linear layers, in which a subclass puts something wrong."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 8}

    width: int = 32

    def middle(self) -> nn.Module:
        """What stands between the two layers."""
        return nn.ReLU()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), self.middle(), nn.Linear(self.width, 10))

    def dataset(self, split: str) -> Any:
        data = torch.randn(16, self.width, generator=torch.Generator().manual_seed(0))
        return [(row, 3) for row in data] if split == "train" else None

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.function(value)


def branch(value: torch.Tensor) -> torch.Tensor:
    """Looks at a value."""
    return value if value.sum() > 0 else -value


def mixed(value: torch.Tensor) -> torch.Tensor:
    """Multiplies two types."""
    return value @ torch.ones(value.shape[-1], value.shape[-1], dtype=torch.float64)


def lopsided(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 alone calls a collective."""
    if dist.get_rank() == 0:
        dist.all_reduce(value.detach().clone())
    return value


def unequal(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 sums one row, the others all."""
    dist.all_reduce(value.detach()[: 1 if dist.get_rank() == 0 else None].clone())
    return value


def configured(task: Task, layout: str, world: int, *overrides: str) -> tuple[Config, Layout]:
    """As the command reads them."""
    config = resolve_config(task_defaults=type(task).defaults, toml=None, overrides=overrides, layout=layout)
    return config, resolve_layout(config, world)


def rehearsed(
    task: Task, layout: str, world: int, *overrides: str, rank: int = 0, full: bool = False, on_cuda: bool = False
) -> RankRehearsal:
    """One rank's step."""
    config, found = configured(task, layout, world, *overrides)
    return rehearse_rank(task, config, World(found, world, on_cuda), rank, full=full)
