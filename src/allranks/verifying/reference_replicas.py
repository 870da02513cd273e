"""What one process computes that plays replicas which send each other less than their gradients: plain torch alone.

`reduced_loop` trains on what a `Reduce` makes of every rank's gradients; the three of them are the laws of
`layout.ddp_hook`. `local_loop` trains copies by themselves, as `layout.local_sgd` does.
"""

import copy
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from allranks.verifying.reference import ReferenceStep, floating_buffers

Gradients = dict[str, torch.Tensor]
Reduce = Callable[[int, Sequence[Gradients]], Gradients]
"""(step, each rank's gradients of its loss * ranks / targets) -> what all ranks take for their mean."""


def reduced_loop(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: Iterable[tuple[Sequence[Any], int]],
    forward: Callable[[nn.Module, Any], torch.Tensor],
    reduce: Reduce,
) -> list[ReferenceStep]:
    """Train `model` in place, where each rank's gradients are made apart and `reduce` puts them together.

    Args:
        steps: of every step, each rank's batch (None: it has none), and the step's number of targets.
        forward: (model, batch) -> the SUM of the loss over the batch's targets.
    """
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    found = []
    for index, (batches, targets) in enumerate(steps):
        ranks, total = list[Gradients](), 0.0
        for batch in batches:
            optimizer.zero_grad()
            if batch is not None:
                loss = forward(model, batch) / targets
                total += float(loss.detach())
                (loss * len(batches)).backward()
            ranks.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
        gradients = reduce(index, ranks)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        found.append(ReferenceStep(total, float(norm), gradients, parameters, floating_buffers(model)))
    return found


def local_loop(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: Iterable[tuple[Sequence[Any], int]],
    forward: Callable[[nn.Module, Any], torch.Tensor],
    make_outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    every: int,
    max_norm: float | None = None,
    last: int | None = None,
    finish: Callable[[nn.Module], None] = lambda model: None,
) -> list[list[ReferenceStep]]:
    """Train copies of `model` that are put together after every so many steps; each copy's steps.

    Args:
        steps: of every step, each copy's batch, and the number of targets of all of them.
        forward: (model, batch) -> the SUM of the loss over the batch's targets.
        make_outer: the optimizer whose gradient is what the copies have gone on the average, with the opposite sign.
        max_norm: each copy clips by its own norm.
        last: number of steps, after which they are put together too.
        finish: what the user's own loop does with a copy after each update.
    """
    outer = make_outer(list(model.parameters()))
    copies, optimizers, found = list[nn.Module](), list[torch.optim.Optimizer](), list[list[ReferenceStep]]()
    for index, (batches, targets) in enumerate(steps):
        if not copies:
            copies = [copy.deepcopy(model) for _ in batches]
            optimizers = [make_optimizer(list(one.parameters())) for one in copies]
            found = [[] for _ in copies]
        seen = []
        for one, batch, optimizer in zip(copies, batches, optimizers, strict=True):
            optimizer.zero_grad()
            loss = forward(one, batch) / targets
            (loss * len(copies)).backward()
            gradients = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), float("inf") if max_norm is None else max_norm)
            optimizer.step()
            finish(one)
            seen.append((float(loss.detach()), float(norm), gradients))
        if (index + 1) % every == 0 or index + 1 == last:
            _put_together(model, copies, outer)
        total = sum(loss for loss, _, _ in seen)
        for one, steps_of_one, (_, norm_of_one, gradients) in zip(copies, found, seen, strict=True):
            parameters = {n: p.detach().clone() for n, p in one.named_parameters()}
            told = total, norm_of_one, gradients, parameters
            steps_of_one.append(ReferenceStep(*told, floating_buffers(one)))
    return found


@torch.no_grad()
def _put_together(model: nn.Module, copies: Sequence[nn.Module], outer: torch.optim.Optimizer) -> None:
    everyones = [dict(one.named_parameters()) for one in copies]
    for name, parameter in model.named_parameters():
        parameter.grad = torch.stack([parameter - own[name] for own in everyones]).mean(0)
    outer.step()
    for name, parameter in model.named_parameters():
        for own in everyones:
            own[name].copy_(parameter)
    # Running statistics and the biases of routers: no optimizer steps them.
    for alike in zip(model.buffers(), *(one.buffers() for one in copies), strict=True):
        stacked = torch.stack(alike[1:])
        for buffer in alike:
            buffer.copy_(stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0))


def mean(step: int, ranks: Sequence[Gradients]) -> Gradients:
    """What DDP does by itself."""
    return {name: torch.stack([rank[name] for rank in ranks]).mean(0) for name in ranks[0]}


def rounded(dtype: torch.dtype) -> Reduce:
    """Each rank's gradient rounded to `dtype`, then added in it; float16 under a power of two that its sum fits."""

    def reduce(step: int, ranks: Sequence[Gradients]) -> Gradients:
        largest = max(float(gradient.abs().max()) for rank in ranks for gradient in rank.values())
        exponent = int(torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent)
        scale = 2.0 ** (15 - exponent - (len(ranks) - 1).bit_length()) if dtype is torch.float16 else 1.0
        found = {}
        for name in ranks[0]:
            total, *others = [(rank[name] * scale).to(dtype) for rank in ranks]
            for other in others:
                total = total + other
            found[name] = total.double() / len(ranks) / scale
        return found

    return reduce


def low_rank(rank: int, start: int) -> Reduce:
    """PowerSGD of the mean from step `start` on: its factors are linear in it, so that no rank is looked at apart."""
    state: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def compressed(name: str, gradient: torch.Tensor) -> torch.Tensor:
        rows = len(gradient) if gradient.dim() > 1 else 1
        columns = gradient.numel() // rows
        if (rows + columns) * min(rank, rows, columns) * 2 >= rows * columns:
            return gradient
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        first = torch.randn(columns, min(rank, rows, columns), generator=generator, dtype=torch.float64)
        unsent, q = state.get(name, (gradient.new_zeros(rows, columns), first))
        matrix = gradient.reshape(rows, columns) + unsent
        p, _ = torch.linalg.qr(matrix @ q)
        q = matrix.T @ p
        state[name] = matrix - p @ q.T, q
        sent: torch.Tensor = (p @ q.T).view(gradient.shape)
        return sent

    def reduce(step: int, ranks: Sequence[Gradients]) -> Gradients:
        found = mean(step, ranks)
        return {name: compressed(name, gradient) for name, gradient in found.items()} if step >= start else found

    return reduce
