"""Slow links by hand: torch's communication hooks, and DiLoCo (arXiv 2311.08105), a loop around the loop.

Source of the hooks: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html (of torch 2.13).
"""

from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.layout import Layout

FLOAT16_ROOM = 2.0**15


def compress(model: DistributedDataParallel, layout: Layout) -> None:
    """Let the gradients of `model` travel as `ddp_hook` says."""
    if layout.ddp_hook == "none":
        return
    # Here, because they bring torch's compiler along, which no other strategy needs.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def round_to_bfloat16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        # DDP refuses torch's own by its name where there is no NCCL, though gloo sums bfloat16.
        return default_hooks.bf16_compress_hook(state, bucket)

    if layout.ddp_hook == "powersgd":
        rank, start = layout.powersgd_rank, layout.powersgd_start
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif layout.ddp_hook == "bfloat16":
        model.register_comm_hook(None, round_to_bfloat16)
    else:
        model.register_comm_hook(None, _sum_in_float16)


def _sum_in_float16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Not torch's own, whose sums overflow and whose small gradients vanish: all agree on a scale, as ours do."""
    buffer, ranks = bucket.buffer(), dist.get_world_size()
    largest = torch.linalg.vector_norm(buffer, torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    scale = torch.exp2(torch.floor(torch.log2(FLOAT16_ROOM / (largest * ranks)))).clamp(max=2.0**126)
    rounded = buffer.mul_(scale).half()

    def widen(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        mean: torch.Tensor = buffer.copy_(done.value()[0]).div_(scale * ranks)
        return mean

    found: torch.futures.Future[torch.Tensor] = dist.all_reduce(rounded, async_op=True).get_future().then(widen)
    return found


@final
class Meetings:
    """Models that train by themselves, and meet: what all have moved on the average is a gradient for one more step."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        assert layout.local_sgd is not None
        self._every = layout.local_sgd
        self._parameters: list[torch.Tensor] = list(model.parameters())
        self._start = [parameter.detach().clone() for parameter in self._parameters]
        self._outer = torch.optim.SGD(
            self._start, lr=layout.outer_lr, momentum=layout.outer_momentum, nesterov=layout.outer_nesterov
        )

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Meet, where that is due after step `step` (from 1); collective then."""
        if step % self._every:
            return
        moved = torch._foreach_sub(self._start, self._parameters)
        together = torch.cat([one.reshape(-1) for one in moved])
        dist.all_reduce(together)
        together /= dist.get_world_size()
        for one, mean in zip(self._start, together.split([part.numel() for part in moved]), strict=True):
            one.grad = mean.view_as(one)
        self._outer.step()
        torch._foreach_copy_(self._parameters, self._start)
