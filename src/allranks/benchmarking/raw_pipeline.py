"""A pipeline by hand: the layers of other stages left out, one `PipelineStage` for each of ours, torch's schedules.

Beside a data axis each stage is a model of its own to FSDP2, which torch's stages know. Copies of a stage add up their
gradients after the schedule: torch's DDP around stages fails an assertion of its own under gpipe, interleaved and
looped_bfs, and it does not follow schedules that split the backward.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html (of torch 2.13).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from allranks.benchmarking.strategies import MICRO_STEPS
from allranks.benchmarking.subject import LR, MAX_NORM
from allranks.even_cut import cut_among
from allranks.layout import THERE_AND_BACK, Layout
from allranks.models.transformer import Transformer

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class StageModule(nn.Module):
    """The layers of one stage; the first has the embedding, the last the norm and the head.

    Args:
        starts: the layer with which each stage begins.
    """

    def __init__(self, model: Transformer, stage: int, starts: Sequence[int]) -> None:
        super().__init__()
        bounds = [*starts, len(model.layers)]
        self.embedding = model.embedding if stage == 0 else None
        self.layers = nn.ModuleList(model.layers[bounds[stage] : bounds[stage + 1]])
        self.head = nn.Sequential(model.norm, model.output) if stage == len(starts) - 1 else None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Tokens or activations -> activations or logits."""
        if self.embedding is not None:
            value = self.embedding(value)
        for layer in self.layers:
            value = layer(value)
        return value if self.head is None else self.head(value)


def cut_layers(model: Transformer, layout: Layout) -> list[int]:
    """The layer with which each stage begins: what a rank multiplies as even as it can be, the head included.

    As ours cuts, or the two would differ in memory by a layer on a rank that keeps several micro-batches.
    """
    costs = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in model.layers]
    costs[-1] += model.output.weight.numel()
    return cut_among(costs, layout.stage_ranks)


def own_stages(layout: Layout, rank: int) -> list[int]:
    """The stages of a rank of the pipeline: dealt in turn, or there and back."""
    if layout.schedule in THERE_AND_BACK:
        return [rank, layout.num_stages - 1 - rank]
    return list(range(rank, layout.num_stages, layout.pp))


def shard_stage(module: StageModule, layout: Layout, mesh: DeviceMesh) -> None:
    """FSDP2 over the ranks that run this stage."""
    keep = None if layout.sharding == "full" else False
    for part in (*module.layers, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=keep)


def pipeline_steps(
    model: Transformer,
    layout: Layout,
    mesh: DeviceMesh,
    batches: Iterable[dict[str, torch.Tensor]],
    device: torch.device,
) -> Iterator[Callable[[], float]]:
    """The plain loop over a pipeline, or several beside each other; each step yields what gives its loss."""
    # Here, because it brings torch's compiler along, which no other strategy needs.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    group, total = mesh.get_group("pp"), layout.num_stages
    stages, starts = own_stages(layout, mesh.get_local_rank("pp")), cut_layers(model, layout)
    made = []
    for stage in stages:
        module = StageModule(model, stage, starts).to(device)
        if layout.dp_shard > 1:
            shard_stage(module, layout, mesh["dp_shard"])
        made.append(PipelineStage(module, stage, total, device, group=group))
    del model  # the other ranks' layers
    kind: Any = get_schedule_class(SCHEDULES[layout.schedule])
    schedule = kind(made if len(made) > 1 else made[0], MICRO_STEPS, loss_fn=_loss, scale_grads=False)
    parameters = [parameter for stage in made for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
    copies = mesh.get_group("dp_replicate") if layout.dp_replicate > 1 else None
    for batch in batches:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = [batch["x"].to(device)] if 0 in stages else []
        target = batch["y"].to(device) if total - 1 in stages else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if copies is not None:
            _add_up(parameters, copies)
        count = batch["y"].numel()
        _clip(parameters, count * layout.dp_replicate, group)
        optimizer.step()
        told = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)
        dist.all_reduce(told)
        yield partial(float, told / (count * layout.dp))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def _add_up(parameters: list[nn.Parameter], copies: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(p.grad, group=copies, async_op=True) for p in parameters if p.grad is not None]
    for work in works:
        if work is not None:
            work.wait()


def _clip(parameters: list[nn.Parameter], count: int, group: dist.ProcessGroup) -> None:
    """Divide by the number of tokens that the gradients are the sum of, and clip by the norm over all stages."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, count)
    square = nn.utils.get_total_norm(gradients).square()
    if isinstance(square, DTensor):
        square = square.full_tensor()
    dist.all_reduce(square, group=group)
    factor = torch.clamp(MAX_NORM / (square.sqrt() + EPSILON), max=1.0)
    torch._foreach_mul_(gradients, factor)
