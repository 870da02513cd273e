"""Where a run stands, as a function of the samples that it has seen: the learning rate, the steps, the settings.

The rate of an update is the peak times what the schedule says at these samples, for every optimizer and group: whoever
else moves it, a scheduler of the user's own above all, is found in the step after, because the loop sets it anew for
each update and what was moved would be lost without a word.

How many steps and updates were made, and with which settings, all ranks must have alike. That is one line of text,
whose digest travels in the agreement of each step.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist

from allranks.data.micro_step import StepBatch
from allranks.stepping.agreement import Pending
from allranks.stepping.alike import everyones, explain_paths, find_parted
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.scaler import Scaler
from allranks.stepping.schedule import Schedule
from allranks.stepping.sentinel import StepSentinel
from allranks.verdict import Verdict

STEPS = "steps"
_BETWEEN = "; "


@final
class Rates(StepSentinel):
    """Is the learning rate what the schedule says, and nobody else's?"""

    name: ClassVar[str] = "schedule"

    def __init__(self, optimizers: Optimizers, schedule: Schedule) -> None:
        self._optimizers, self._schedule = optimizers, schedule
        self._updated: dict[
            str, tuple[int, int]
        ] = {}  # optimizer -> (samples before it, size) of the step of its last update

    def look(self, which: str, batch: StepBatch) -> Verdict | None:
        before, self._updated[which] = self._updated.get(which), (batch.seen, batch.size)
        if before is None:
            return None
        factor = self._schedule.factor(*before)
        strayed = self._strayed(which, factor)
        if strayed is None:
            return None
        group, found, due = strayed
        what = (
            f"step {batch.step + 1}: something besides the schedule moves the learning rate: {group} has {found:.6g}, "
            f"and the schedule says {due:.6g} after {before[0]} samples"
        )
        evidence = (
            "the loop sets the rate before each update, as a function of samples seen: what is moved has no effect"
        )
        remedy = "take schedule.name and schedule.warmup in place of a scheduler of your own, or step none in the Task"
        return Verdict("rate_moved", what, (evidence,), remedy)

    def _strayed(self, which: str, factor: float) -> tuple[str, float, float] | None:
        """(group, its learning rate, `factor` of its peak) of the first where these are not the same number, or None.

        A rate that is a tensor did not come from the loop, and is not looked at: that would wait for the device.
        """
        for name in self._optimizers.named(which):
            optimizer = self._optimizers.by_name[name]
            for index, (group, peak) in enumerate(
                zip(optimizer.param_groups, self._optimizers.peaks[name], strict=False)
            ):
                rate = group["lr"]
                if isinstance(rate, float) and rate != peak * factor:
                    return f"group {index} of {type(optimizer).__name__}", rate, peak * factor
        return None


def pace_of(optimizers: Optimizers, scaler: Scaler | None, *, settings: bool) -> Callable[[StepBatch], str]:
    """Says where this rank stands in a step, as (first sample, updates begun before it, settings of the optimizers).

    Args:
        scaler: whose scale is told where it is at hand.
        settings: whether every rank has the same groups of parameters; stages of a pipeline do not.
    """
    tells_scale = scaler is not None and scaler.scale.device.type == "cpu"

    def tell(batch: StepBatch) -> str:
        found = [
            f"step {batch.step + 1}",
            f"sample {batch.position}",
            f"{optimizers.num_updates} updates begun before it",
        ]
        if tells_scale and scaler is not None:
            found.append(f"scale {float(scaler.scale)}")
        return _BETWEEN.join(found + _settings(optimizers) if settings else found)

    return tell


def _settings(optimizers: Optimizers) -> list[str]:
    """Every number in a group of the optimizers besides the rate, as text, in one order."""
    return [
        f"{key} {value} in group {index} of {name or type(optimizer).__name__}"
        for name, optimizer in optimizers.by_name.items()
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "lr" and isinstance(value, int | float)
    ]


def explain_pace(pending: Pending, step: int, group: dist.ProcessGroup | None, device: torch.device) -> Verdict | None:
    """What ranks do not have alike, of which the agreement of step `step` (from 1) says that they differ; collective.

    None where what they tell now is alike: they have been asked before.

    Raises:
        TaskError: on every rank: their forwards have entered different units.
    """
    told = everyones([pending.stage, list(pending.path), pending.pace], group, device)
    paths = [(stage, path) for stage, path, _ in told]
    if find_parted(paths) is not None:
        raise explain_paths(paths, step)
    return compare_paces([pace for _, _, pace in told], step)


def compare_paces(paces: Sequence[str], step: int) -> Verdict | None:
    """What differs first among what the ranks tell of step `step`; None where nothing does."""
    rank = next((rank for rank, pace in enumerate(paces) if pace != paces[0]), None)
    if rank is None:
        return None
    first, other = _parting(paces[0].split(_BETWEEN), paces[rank].split(_BETWEEN))
    what = f"step {step}: the ranks no longer make the same steps: rank 0 has {first}, rank {rank} has {other}"
    evidence = tuple(f"rank {index}: {pace}" for index, pace in enumerate(paces) if pace != paces[0])[:4]
    remedy = "let no rank change optimizers or their settings alone: look for what the Task does on some ranks only"
    return Verdict("steps_differ", what, (f"rank 0: {paces[0]}", *evidence), remedy)


def _parting(first: Sequence[Any], other: Sequence[Any]) -> tuple[str, str]:
    for one, two in zip(first, other, strict=False):
        if one != two:
            return str(one), str(two)
    longer = max(first, other, key=len)[min(len(first), len(other))]
    return (str(longer), "none") if len(first) > len(other) else ("none", str(longer))
