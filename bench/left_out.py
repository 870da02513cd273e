"""Modules that a forward may leave out (`hints().optional`), beside one device that gives them zeros."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import allranks

OPTIONAL = ("branch",)
LAW = "zero gradients where no sample needs the module, which momentum and weight decay move on; one device gives None"
GLOBAL_BATCH, LEARNING_RATE = 9, 0.05


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Eight values and a class; one sample in twelve needs the branch, so that many steps do without."""

    draws = False

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        few = torch.tensor(index % 12 == 0)
        return {"x": torch.randn(8, generator=generator, dtype=torch.float64), "few": few, "y": torch.tensor(index % 3)}


class Branching(nn.Module):
    """A layer that few samples need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if few.any():
            hidden = hidden.index_add(0, few.nonzero()[:, 0], self.branch(hidden[few]))
        found: torch.Tensor = self.last(hidden)
        return found


def make_model() -> nn.Module:
    """The same values in every process."""
    torch.manual_seed(0)
    return Branching().double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """With momentum and weight decay, which tell zeros from nothing."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, weight_decay=0.1)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The sum over samples."""
    return functional.cross_entropy(model(batch["x"], batch["few"]), batch["y"], reduction="sum")


def train(layout: str, folder: str, steps: int) -> dict[str, torch.Tensor]:
    """In every process: the parameters at the end."""
    with allranks.join(layout=layout, precision="float64", run=folder) as world:
        module = make_model()
        model = world.parallelize(module, optional=OPTIONAL)
        settings = {"lr": LEARNING_RATE, "momentum": 0.9, "weight_decay": 0.1}
        optimizer = world.optimizer(model, torch.optim.SGD, **settings)
        for batch in world.stream(Samples(), global_batch=GLOBAL_BATCH, steps=steps, shuffle=False):
            world.backward(loss_of(model, batch), targets=len(batch["y"]))
            world.step(optimizer)
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def simulate(steps: int, *, zeros: bool) -> dict[str, torch.Tensor]:
    """The same steps on one device in plain torch; with `zeros`, what has no gradient gets that."""
    model, dataset = make_model(), Samples()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        items = [dataset[step * GLOBAL_BATCH + at] for at in range(GLOBAL_BATCH)]
        optimizer.zero_grad()
        (loss_of(model, torch.utils.data.default_collate(items)) / GLOBAL_BATCH).backward()
        for parameter in model.parameters():
            if zeros and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return dict(model.state_dict())


def measure_left_out(num_ranks: int, steps: int, folder: str) -> tuple[Any, Any, Any]:
    """The run of `num_ranks` processes, its simulation on one device, and plain torch without zeros."""
    ranks = allranks.launch(train, "ddp", f"{folder}/run", steps, nproc=num_ranks)
    return ranks[0], simulate(steps, zeros=True), simulate(steps, zeros=False)
