"""What holds float16 to its simulation: samples that overflow at first, and the plain loop with torch's scaler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.models.moe import Router
from allranks.verifying.reference import ScaledStep, scaled_loop
from tests.distributed.sessions import initial_model
from tests.distributed.tasks import IGNORED, OF_WORDS, Points, Tiny, Words

STEPS = 9
MAX_NORM = 0.5
ADAM = ("optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.01")
SGD = ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.weight_decay=0")


def weight_of(sample: int) -> float:
    """By which its loss is multiplied."""
    return 100.0 if sample % 5 == 3 else 1.0


class Heavy(Tiny):
    """Some samples weigh so much that their gradients leave float16 at first: on the rank that has them alone."""

    def model(self) -> nn.Module:
        found = super().model()
        for layer in found.modules():
            if isinstance(layer, Router):
                layer.rate = 0.0  # the plain loop does not move the routers' biases
        return found

    def dataset(self, split: str) -> Any:
        source = Words() if self.kind in OF_WORDS else Points()
        weights = [{"weight": torch.tensor(weight_of(index)), "index": torch.tensor(index)} for index in range(61)]
        return [dict(source[index], **weights[index]) for index in range(61)]

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        losses = functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="none")
        found: torch.Tensor = (losses.view(len(batch["y"]), -1) * batch["weight"].unsqueeze(1)).sum()
        return found

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {}


def targets_of(batch: Any) -> int:
    """The labels that count."""
    return int((torch.as_tensor(batch["y"]) != IGNORED).sum())


def simulate(
    kind: str,
    optimizer: Sequence[str],
    samples: Sequence[Sequence[Sequence[int]]],
    expected: Sequence[int] = (),
    max_norm: float = MAX_NORM,
) -> list[ScaledStep]:
    """A run in one process of plain torch; `samples` of each step and of each forward that rounds by itself.

    Args:
        expected: as of `scaled_loop`.
    """
    task = Heavy(kind=kind)
    dataset, model, work = task.dataset("train"), initial_model(task), []
    for forwards in samples:
        batches = [default_collate([dataset[sample] for sample in own]) for own in forwards if own]
        work.append((batches, sum(targets_of(batch) for batch in batches)))

    def forward(module: nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(module(batch["x"]).float(), batch)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if optimizer is SGD:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01, fused=True)

    return scaled_loop(model, make, work, forward, max_norm, expected)


def check_skips(told: Sequence[dict[str, float]], expected: Sequence[ScaledStep], samples: Any) -> None:
    """The steps of a run tell of the scales and skips that were `expected`; some of them one rank has found alone.

    Args:
        told: `loss_scale`, `skipped_steps` and perhaps `skipped` of each step.
        samples: of each step and rank.
    """
    scales, wanted = [values["loss_scale"] for values in told], [step.scale for step in expected]
    assert scales == wanted, (scales, wanted)
    skips = ["skipped" in values for values in told]
    assert skips == [step.skipped for step in expected]
    assert sum(skips) >= 2 and not all(skips[-3:]), "some steps are skipped, and it goes on"
    alone = [sum(any(weight_of(s) > 1 for s in own) for own in ranks) == 1 for ranks in samples]
    assert any(one and skipped for one, skipped in zip(alone, skips, strict=True)), "one rank has found it"
    assert told[-1]["skipped_steps"] == sum(skips)


def check_parameters(
    found: Sequence[dict[str, torch.Tensor]], expected: Sequence[ScaledStep], tolerance: float
) -> None:
    """Whole parameters after each step are within `tolerance` of each one's largest value."""
    for step, wanted in enumerate(expected):
        for key, value in wanted.parameters.items():
            far, size = float((found[step][key] - value).abs().max()), float(value.abs().max())
            assert far <= tolerance * size, (step, key, far, size)
