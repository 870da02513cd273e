"""Whether ring attention's blocks and their backward are those of whole attention on this device, in its kernels."""

from typing import Any

import torch
from torch.nn import functional
from verdicts import row

from allranks.parallel.attention_blocks import attend, attend_backward

CLOSE = 0.02
"""Of the largest entry: bfloat16 has eight bits, and two blocks are merged."""


def check_ring(device: torch.device) -> dict[str, Any]:
    """Queries over two blocks of keys, merged by their sums, beside float64 over all of them."""
    what = "ring attention's blocks are whole attention"
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 128, 64), (2, 4, 256, 64), (2, 4, 256, 64), (2, 8, 128, 64))
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    query, key, value, gradient = (part.to(device, torch.bfloat16) for part in whole)
    blocks = [(part, other) for part, other in zip(key.chunk(2, 2), value.chunk(2, 2), strict=True)]
    found = [attend(query, *block, causal=False, scale=None) for block in blocks]
    log_sum = torch.logaddexp(*(sums.float() for _, sums in found))
    output = torch.stack([part.float() * (sums.float() - log_sum).exp().unsqueeze(-1) for part, sums in found]).sum(0)
    merged = output.to(torch.bfloat16), log_sum.to(found[0][1].dtype)
    back = [attend_backward(gradient, query, *block, *merged, causal=False, scale=None) for block in blocks]
    of_query = torch.stack([one[0].float() for one in back]).sum(0)
    ours = (output, of_query, *(torch.cat([one[index] for one in back], 2) for index in (1, 2)))
    away = {
        name: float((one.double().cpu() - other).abs().max() / other.abs().max())
        for name, one, other in zip(("output", "query", "key", "value"), ours, _expected(whole), strict=True)
    }
    worst = max(away, key=lambda name: away[name])
    return row(what, away[worst] < CLOSE, None, f"{worst} is {away[worst]:.1e} of its largest entry away")


def _expected(whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients in float64, of the rounded inputs."""
    query, key, value, gradient = (part.bfloat16().double() for part in whole)
    for part in (query, key, value):
        part.requires_grad_()
    output = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), gradient)]
