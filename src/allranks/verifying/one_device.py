"""What one device computes: plain torch, which knows nothing of how anything is spread, trained or loaded.

Every step is one update of each optimizer whose loss is yielded: the loss summed over all samples of the step, divided
once by the number of its targets, one backward, torch's own clipping. `allranks verify` compares a Task with this.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Losses = Callable[[Mapping[str, nn.Module], Any], Iterator[tuple[str, torch.Tensor, int]]]
Watch = Callable[[int, str, float, float], None]


def train_on_one_device(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    steps: Iterable[Any],
    losses: Losses,
    factor: Callable[[int], float],
    max_norm: float | None,
    before_update: Watch,
    after_step: Callable[[int], None],
) -> None:
    """Train `models` in place.

    Args:
        losses: (models, what a step is fed) -> (optimizer's name, SUM of the loss over its targets, targets).
        factor: step -> factor on the learning rates that the optimizers begin with.
        before_update: told (step, optimizer's name, loss per target, gradient norm), before gradients are clipped.
        after_step: told the step.
    """
    peaks = {name: [g.get("initial_lr", g["lr"]) for g in one.param_groups] for name, one in optimizers.items()}
    for index, batch in enumerate(steps):
        for name, loss, targets in losses(models, batch):
            for model in models.values():
                model.zero_grad()
            mean = loss / max(1, targets)
            mean.backward()
            held = [p for group in optimizers[name].param_groups for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
            before_update(index, name, float(mean.detach()), float(norm))
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(held, max_norm)
            for group, peak in zip(optimizers[name].param_groups, peaks[name], strict=True):
                group["lr"] = peak * factor(index)
            optimizers[name].step()
        after_step(index)


@torch.no_grad()
def evaluate_on_one_device(terms: Iterable[Mapping[str, tuple[Any, Any]]]) -> dict[str, float]:
    """name -> sum of all sums / sum of all counts."""
    every = [{name: (float(a), float(b)) for name, (a, b) in one.items()} for one in terms]
    sums = {
        name: tuple(sum(one[name][i] for one in every if name in one) for i in (0, 1)) for one in every for name in one
    }
    return {name: total / count if count else float("nan") for name, (total, count) in sums.items()}
