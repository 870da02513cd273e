"""Exact evaluation: every sample of the validation split once, whatever the number of ranks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real

import torch
import torch.distributed as dist

from allranks.data.micro_step import MicroStep
from allranks.data.random_keys import seed_all
from allranks.errors import TaskError
from allranks.parallel.parallelize import Spread
from allranks.stepping.passes import Forward, buffers_kept


@torch.no_grad()
def evaluate(forward: Forward, batches: Iterable[MicroStep], group: dist.ProcessGroup | None) -> dict[str, float]:
    """The mean loss per target and every metric of the Task over the whole split; collective.

    Nothing of the model changes, not even a buffer that counts its forwards.

    Args:
        batches: this rank's share; each rank has equally many, some of them fillers of weight 0, which count nothing.
        group: the ranks that share the split; None for one.

    Returns:
        {"loss": ..., metric: ...}: each the world's sum divided by the world's count, in float64.

    Raises:
        TaskError: what `metrics` returns is no dict of (sum, count).
    """
    spread = forward.spread
    sums: dict[str, list[float]] = {}
    with _evaluation_mode(spread), buffers_kept(spread, unless=False):
        for micro_step in batches:
            seed_all(micro_step.random_key)
            batch = forward.place(micro_step.batch)
            output = forward(batch)
            loss = (forward.task.loss(output, batch), micro_step.targets or 0)
            terms = {"loss": loss, **_checked(forward.task.metrics(output, batch))}
            for name, (total, count) in terms.items():
                held = sums.setdefault(name, [0.0, 0.0])
                # A filler names its metrics, and adds nothing: not even 0 * nan.
                if micro_step.weight:
                    held[0] += _number(name, total)
                    held[1] += _number(name, count)
    return _reduce(sums, group, spread.device)


@contextmanager
def _evaluation_mode(spread: Spread) -> Iterator[None]:
    """Every module in evaluation mode inside; afterwards each in its own (a frozen part stays as it was), resharded."""
    modes = [(part, part.training) for module in spread.modules.values() for part in module.modules()]
    for module in spread.modules.values():
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        spread.reshard()


def _checked(metrics: object) -> Mapping[str, tuple[object, object]]:
    fits = isinstance(metrics, Mapping) and all(isinstance(v, tuple) and len(v) == 2 for v in metrics.values())
    if not isinstance(metrics, Mapping) or not fits:
        raise TaskError(f"metrics() returned {metrics!r:.80}: return {{name: (sum, count)}}")
    return metrics


def _number(name: str, value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, Real):
        return float(value)
    raise TaskError(f"metrics(): {name} has {value!r:.80} where a number is due: return {{name: (sum, count)}}")


def _reduce(sums: dict[str, list[float]], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    names = sorted(sums)
    table = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(table, group=group)
    rows = zip(names, table.tolist(), strict=True)
    return {name: total / count if count else float("nan") for name, (total, count) in rows}
