"""The sum or mean over ranks of gradients that nobody has reduced in the backward."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def average_gradients(
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    divisor: int,
    device: torch.device | None = None,
) -> None:
    """Sum every `.grad` over `group` and divide by `divisor`, in one reduction a dtype; collective.

    A missing gradient counts as zero, and is one afterwards. Of a DTensor this rank's part is meant. The sums travel on
    `device`, by default where the gradients are.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [gradient._local_tensor if isinstance(gradient, DTensor) else gradient for gradient in found]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        some = [gradient for gradient in gradients if gradient.dtype is dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in some]).to(device)
        dist.all_reduce(flat, group=group)
        flat /= divisor
        for gradient, part in zip(some, flat.split([gradient.numel() for gradient in some]), strict=True):
            gradient.copy_(part.view(gradient.shape))
