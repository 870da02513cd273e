"""Exact evaluation: every sample of the validation split once, whatever the number of ranks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import torch
import torch.distributed as dist

from allranks import fault_points
from allranks.data.micro_step import MicroStep
from allranks.data.random_keys import seed_all
from allranks.errors import TaskError
from allranks.parallel.gather import RanksRows
from allranks.stepping.evaluation_mode import evaluation_mode
from allranks.stepping.fed import fed
from allranks.stepping.passes import Forward, buffers_kept
from allranks.task import Task
from allranks.task_world import rows_of
from allranks.vocabulary import whole_logits

Number = float | torch.Tensor


@torch.no_grad()
def evaluate(forward: Forward, batches: Iterable[MicroStep], group: dist.ProcessGroup | None) -> dict[str, float]:
    """The mean loss per target and every metric of the Task over the whole split; collective.

    Nothing of the model changes, not even a buffer that counts its forwards.

    Args:
        batches: this rank's share; each rank has equally many, some of them fillers of weight 0, which count nothing.
        group: the ranks that share the split, or its sequences; None for one.

    Returns:
        {"loss": ..., metric: ...}: as `world_means` gives them.

    Raises:
        TaskError: what `metrics` returns is no dict of (sum, count), or has the name of the loss.
    """
    spread = forward.spread
    found: dict[str, list[Number]] = {}
    with evaluation_mode(spread.modules.values()), buffers_kept(spread, unless=False):
        spread.batch_norms.average()
        for micro_step in batches:
            fault_points.reach("evaluate")
            seed_all(micro_step.random_key)
            batch = forward.place(micro_step.batch)
            with fed(micro_step), spread.batch_norms.counting(micro_step.weight > 0):
                output = forward(batch)
            if not spread.mesh.has_output:
                continue  # the last stage of the pipeline tells
            # Targets are counted in whole samples: of the ranks that share a sequence one tells.
            targets = 0 if spread.mesh.coordinate("cp") else micro_step.targets or 0
            with rows_of(RanksRows(spread.mesh.data_group, counts=micro_step.weight > 0)):
                loss = (forward.task.loss(output, batch), targets)
                terms = {"loss": loss, **measure(forward.task, output, batch)}
            if not micro_step.weight:
                continue  # a filler adds nothing, not even 0 * nan
            for name, (total, count) in terms.items():
                held = found.setdefault(name, [0.0, 0.0])
                held[:] = held[0] + _number(name, total), held[1] + _number(name, count)
    sums = {name: [float(part) for part in held] for name, held in found.items()}
    if spread.stages is not None:
        # The first rank has to hear of it, too: of the ranks with the same samples one tells.
        return world_means(sums if spread.mesh.adds_loss else {}, dist.group.WORLD, spread.device)
    return world_means(sums, group, spread.device)


def world_means(
    sums: Mapping[str, Sequence[float]], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """The world's sum of each name divided by the world's count, in float64, sorted by name; collective.

    Names may differ by rank, as those of classes do: every rank gets all of them, in one order, and one that a rank
    does not have counts nothing there. What nobody counted (the world's count is 0) is nan.

    Args:
        sums: name -> (sum, count) of this rank.
        group: the ranks that share the samples; None for one.
        device: where the group's backend wants its tensors.
    """
    names = sorted(sums) if group is None else _everyones(sorted(sums), group, device)
    if not names:
        return {}
    table = torch.tensor([list(sums.get(name, (0.0, 0.0))) for name in names], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(table, group=group)
    rows = zip(names, table.tolist(), strict=True)
    return {name: total / count if count else float("nan") for name, (total, count) in rows}


def _everyones(names: list[str], group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The names that one rank has at least, sorted. They travel as padded bytes: nothing is pickled."""
    text = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(length) for length in torch.cat(sizes).tolist()]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(text)] = text
    mine = mine.to(device)
    parts = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(parts, mine, group=group)
    texts = [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
    return sorted({name for one in texts for name in json.loads(one)})


def measure(task: Task, output: object, batch: object) -> dict[str, tuple[object, object]]:
    """The Task's metrics; only where it has some are logits that stayed cut over tp made whole for them."""
    if type(task).metrics is Task.metrics:
        return {}
    return _checked(task, task.metrics(whole_logits(output), batch))


def _checked(task: Task, metrics: object) -> dict[str, tuple[object, object]]:
    fits = isinstance(metrics, Mapping) and all(isinstance(v, tuple) and len(v) == 2 for v in metrics.values())
    if not isinstance(metrics, Mapping) or not fits:
        raise TaskError(f"metrics() returned {metrics!r:.80}: return {{name: (sum, count)}}")
    named = {str(name): value for name, value in metrics.items()}
    if "loss" in named:
        what = f"{type(task).__name__}.metrics() names one of its metrics 'loss'"
        raise TaskError(f"{what}, which is the name of what loss() returns: give it another name")
    return named


def _number(name: str, value: object) -> Number:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        # A GPU's stays there, in float64 as python's numbers are: the host waits for none of them.
        return float(value) if value.device.type == "cpu" else value.detach().double().reshape(())
    if isinstance(value, Real):
        return float(value)
    raise TaskError(f"metrics(): {name} has {value!r:.80} where a number is due: return {{name: (sum, count)}}")
