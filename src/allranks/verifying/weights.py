"""With which weights the gradients of some batches make up another one: a least-squares fit."""

import math
from collections.abc import Mapping, Sequence

import torch

from allranks.verifying.assembly import put_together
from allranks.verifying.evidence import Evidence
from allranks.verifying.recording import Parts

SPAN = {torch.float64: 1e-7, torch.float32: 3e-5, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative, of what a combination of the ranks' gradients leaves unexplained, by the least precise type of a step.
In the models that were tried (convolutions, transformers of 2 to 24 layers, 12 layers with LayerNorm) sums left 1e-7 to
3e-6 in float32, and up to 0.02 in bfloat16."""
OF_MOST = 0.01  # of the largest tensor's norm: less than that may be zero but for rounding
UNEVEN = 1e-6  # relative, of weights: beyond that they are other ones, or beyond SPAN where that is more


def weights_of(evidence: Evidence, step: int, what: str) -> tuple[str, str] | None:
    """(kind, in words) from the weights with which the ranks' own gradients make up what was found and expected."""
    shares = evidence.shares(step)
    if not shares:
        return None
    span = SPAN[evidence.one.lowest]
    one, ranks = evidence.step(step)
    expected: Parts = getattr(one, what)
    held = [getattr(rank, what) for rank in ranks]
    found_whole = {n: put_together(n, p.value, held, evidence.places) for n, p in expected.items()}
    flat_found = _flat(found_whole, expected)
    flat_expected = _flat({n: p.value for n, p in expected.items()}, expected)
    own = [(rank, _flat(batch, expected)) for rank, batches in enumerate(shares) for batch in batches]
    if flat_found is None or flat_expected is None or any(vector is None for _, vector in own):
        return None
    matrix = torch.stack([vector for _, vector in own if vector is not None], 1)
    got, rest = _solve(matrix, flat_found)
    due, rest_due = _solve(matrix, flat_expected)
    if rest_due > span and rest > span and any(not _is_everywhere(evidence, name) for name in expected):
        return "S16", "neither side is a sum over the ranks' own batches: a loss over all samples does not compose"
    if rest_due > span:
        return "S29", "what one device computes is no sum over the ranks' own batches: the loss couples samples"
    if rest > span:
        return None
    words = f"weights of the ranks' batches {_shown(got)}, on one device {_shown(due)}"
    ratios = [float(a / b) if abs(float(b)) > 1e-9 else math.nan for a, b in zip(got, due, strict=True)]
    by_rank: dict[int, list[float]] = {}
    for (rank, _), ratio in zip(own, ratios, strict=True):
        by_rank.setdefault(rank, []).append(ratio)
    uneven = max(UNEVEN, span)
    inside = any(max(some) - min(some) > uneven for some in by_rank.values())
    means = [sum(some) / len(some) for some in by_rank.values()]
    if inside:
        return "S8", words
    return ("S9", words) if max(means) - min(means) > uneven else None


def _is_everywhere(evidence: Evidence, name: str) -> bool:
    return all(name in run.start.parameters for run in evidence.ranks)


def is_sum_of(gradients: Parts, own: Sequence[Mapping[str, torch.Tensor]], lowest: torch.dtype = torch.float64) -> bool:
    """Whether some gradients are a weighted sum of others, each tensor's with the same weights.

    Args:
        lowest: the least precise type in which they are computed.
    """
    target, vectors = (
        _flat({n: p.value for n, p in gradients.items()}, gradients),
        [_flat(one, gradients) for one in own],
    )
    if target is None or any(vector is None for vector in vectors):
        return False
    matrix = torch.stack([vector for vector in vectors if vector is not None], 1)
    sizes = [part.value.numel() for part in gradients.values()]
    rests = [float(part.norm()) for part in (matrix @ _solve(matrix, target)[0] - target).split(sizes)]
    norms = [float(part.norm()) for part in target.split(sizes)]
    return all(rest <= SPAN[lowest] * max(norm, OF_MOST * max(norms)) for rest, norm in zip(rests, norms, strict=True))


def _flat(tensors: Mapping[str, torch.Tensor | None], order: Parts) -> torch.Tensor | None:
    some = [tensors.get(name) for name in order]
    zeros = [torch.zeros_like(p.value) if t is None else t for t, p in zip(some, order.values(), strict=True)]
    return torch.cat([t.double().reshape(-1) for t in zeros]) if zeros else None


def _solve(matrix: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(weights, relative rest) of the least-squares fit."""
    weights = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    return weights, float((matrix @ weights - target).norm() / target.norm().clamp(min=1e-300))


def _shown(weights: torch.Tensor) -> str:
    return "[" + ", ".join(f"{float(w):.4g}" for w in weights[:8]) + (", ..." if len(weights) > 8 else "") + "]"
