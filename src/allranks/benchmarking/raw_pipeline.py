"""A pipeline by hand: the layers of other stages left out, one `PipelineStage`, and torch's 1F1B or GPipe.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html (of torch 2.13).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from allranks.benchmarking.subject import LR, MAX_NORM, MICRO_STEPS
from allranks.layout import Layout
from allranks.models.transformer import Transformer

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class StageModule(nn.Module):
    """The layers of one stage, dealt equally; the first has the embedding, the last the norm and the head."""

    def __init__(self, model: Transformer, stage: int, num_stages: int) -> None:
        super().__init__()
        bounds = [len(model.layers) * index // num_stages for index in range(num_stages + 1)]
        self.embedding = model.embedding if stage == 0 else None
        self.layers = nn.ModuleList(model.layers[bounds[stage] : bounds[stage + 1]])
        self.head = nn.Sequential(model.norm, model.output) if stage == num_stages - 1 else None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Tokens or activations -> activations or logits."""
        if self.embedding is not None:
            value = self.embedding(value)
        for layer in self.layers:
            value = layer(value)
        return value if self.head is None else self.head(value)


def pipeline_steps(
    model: Transformer, layout: Layout, batches: Iterable[dict[str, torch.Tensor]], device: torch.device
) -> Iterator[Callable[[], float]]:
    """The plain loop over a pipeline of all processes, one stage on each; each step yields what gives its loss."""
    # Here, because it brings torch's compiler along, which no other strategy needs.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    stage, last = dist.get_rank(), layout.pp - 1
    module = StageModule(model, stage, layout.pp).to(device)
    made = PipelineStage(module, stage, layout.pp, device)
    kind = get_schedule_class(SCHEDULES[layout.schedule])
    schedule: Any = kind(made, MICRO_STEPS, loss_fn=_loss, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    for batch in batches:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = [batch["x"].to(device)] if stage == 0 else []
        target = batch["y"].to(device) if stage == last else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        count = batch["y"].numel()
        _clip(list(module.parameters()), count)
        optimizer.step()
        told = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)
        dist.all_reduce(told)
        yield partial(float, told / count)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def _clip(parameters: list[nn.Parameter], count: int) -> None:
    """Divide by the number of tokens, and clip by the norm over all stages."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, count)
    square = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square)
    factor = torch.clamp(MAX_NORM / (square.sqrt() + EPSILON), max=1.0)
    torch._foreach_mul_(gradients, factor)
