"""A small loop of one's own, as the tests of the second door run it: in the pool, alone, or as a script."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

import allranks
from allranks.data.cut import Cut
from allranks.data.stream import DataStream
from allranks.run import Run
from allranks.training.door import World
from allranks.verifying.parity import Parts, RecordedStep, parts_of
from allranks.verifying.reference import ReferenceStep, plain_loop

NUM_SAMPLES = 37
LABELS = 4


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Four labels a sample, of which a different number counts; every sample is another one."""

    def __init__(self, size: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 5, (size, LABELS), generator=generator)
        self.y[torch.rand(size, LABELS, generator=generator) < 0.4] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index], "index": torch.tensor(index)}


class Block(nn.Module):
    """Repeated, so that sharded layouts find units."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.drop(torch.tanh(self.linear(self.norm(x))))
        return x + update


class Net(nn.Module):
    """Blocks, tied weights and a parameter without dims."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(3)))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.heads = nn.ModuleList(nn.Linear(width, 5) for _ in range(LABELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.first(x)) * self.scale
        return torch.stack([head(hidden) for head in self.heads], dim=1)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum over the labels that count."""
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")


def count(batch: dict[str, torch.Tensor]) -> int:
    """The labels that count."""
    return int((batch["y"] != -100).sum())


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    """With momentum, so that state matters."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def built(seed: int, **settings: Any) -> Net:
    """The same values wherever it runs."""
    torch.manual_seed(seed)
    return Net(**settings)


def own_loop(
    folder: str,
    layout: str,
    *,
    max_norm: float | None = None,
    precision: str = "float64",
    join: Mapping[str, Any] = MappingProxyType({}),
    **cutting: Any,
) -> list[RecordedStep]:
    """A whole loop on one rank, and what it held after every step. Ranks build different models."""
    steps: list[RecordedStep] = []
    with allranks.join(layout=layout, precision=precision, run=folder, **join) as world:
        module = built(7 if world.rank == 0 else 100 + world.rank)
        model = world.parallelize(module, tensor={"blocks.*.linear": "vocab", "heads.*": "vocab"})
        gradients: Parts = {}
        optimizer = world.optimizer(model, sgd)
        optimizer.register_step_pre_hook(lambda *_: gradients.update(parts(world, gradient=True)))
        stream = world.stream(Samples(), seed=3, **cutting)
        for batch in stream:
            loss = loss_of(model, batch)
            world.backward(loss, targets=count(batch))
            if world.step(optimizer, max_norm=max_norm):
                steps.append(RecordedStep(0.0, 0.0, "", dict(gradients), parts(world), [], [], buffers(world)))
            world.log(loss=loss)
    return steps


def with_journal(steps: list[RecordedStep], folder: Path) -> list[RecordedStep]:
    """The steps with the numbers that the journal tells of them."""
    lines = Run.open(folder).steps()
    return [
        replace(step, loss=line["loss"], norm=line["grad_norm"], ledger=line["ledger"])
        for step, line in zip(steps, lines, strict=True)
    ]


def parts(world: World, *, gradient: bool = False) -> Parts:
    """This rank's part of every trainable parameter, or of its gradient."""
    spread = world._ground.models.trained
    found: Parts = {}
    for name, parameter in spread.trainable().items():
        tensor = parameter.grad if gradient else parameter
        assert tensor is not None
        local = getattr(tensor, "_local_tensor", tensor).detach()
        found[name] = (spread.map[name].box, local.clone())
    return found


def buffers(world: World) -> Parts:
    """This rank's buffers."""
    return parts_of(world._ground.models.trained, "buffer")


def batches(**cutting: Any) -> tuple[list[dict[str, torch.Tensor]], list[tuple[list[int], list[int]]]]:
    """The whole global batches of one process, and (positions, samples) of each."""
    epochs = cutting.get("epochs", 1 if cutting.get("steps") is None else None)
    cut = Cut(cutting["global_batch"], 1)
    order = DataStream(Samples(), cut=cut, seed=3, epochs=epochs, steps=cutting.get("steps"))
    plans = [(list(plan.positions), list(plan.samples)) for step in order.steps() for plan in step.micro_plans]
    dataset = Samples()
    return [default_collate([dataset[int(i)] for i in samples]) for _, samples in plans], plans


def plain(max_norm: float | None = None, **cutting: Any) -> list[ReferenceStep]:
    """The plain loop over them."""
    whole, _ = batches(**cutting)
    make: Callable[..., torch.optim.Optimizer] = sgd
    return plain_loop(built(7).double(), make, [(batch, count(batch)) for batch in whole], loss_of, max_norm)


class Crash(Exception):
    """What ends a loop in the middle."""


def resumable(
    folder: str, layout: str, *, crash_after: int | None = None, width: int = 8, steps: int = 7, **cutting: Any
) -> dict[str, torch.Tensor]:
    """A loop with everything that has to be kept: dropout, AdamW, a scheduler; this rank's tensors at its end."""
    with allranks.join(layout=layout, run=folder) as world:
        model = world.parallelize(built(7, width=width, dropout=0.25).float())
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
        stream = world.stream(Samples(), steps=steps, **cutting)
        world.resume(model, optimizer, stream, scheduler=scheduler)
        for batch in stream:
            world.backward(loss_of(model, {**batch, "x": batch["x"].float()}), targets=count(batch))
            if world.step(optimizer, max_norm=1.0):
                scheduler.step()
            world.save(every=2)
            if stream.step == crash_after:
                raise Crash
        return everything(world)


def everything(world: World) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, as this rank holds them."""
    spread = world._ground.models.trained
    found = {name: spread.local(name).clone() for name in spread.map.stored}
    (optimizers,) = world._optimizers.made.values()
    return found | {entry.name: tensor.clone() for entry, tensor in optimizers.parts()}


def crashing(folder: str, layout: str, crash_after: int, **settings: Any) -> bool:
    """The same, up to its crash."""
    try:
        resumable(folder, layout, crash_after=crash_after, **settings)
    except Crash:
        return True
    return False


def refusal(call: Callable[[], object]) -> str:
    """The class and message of the error that `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
