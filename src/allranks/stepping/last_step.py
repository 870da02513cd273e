"""The last step of `train.epochs`, which is short where the samples do not divide: has BatchNorm enough of them?

A BatchNorm over rows of numbers has nothing to normalise where a forward has one of them, and torch raises ValueError.
Met in the last step that would lose the run, and each resume would meet it again. A BatchNorm over images or sequences
has many values for each channel of a single sample.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from allranks.data.cut import Cut
from allranks.data.plain_batch import plain_batch
from allranks.data.stream import DataStream
from allranks.errors import ConfigError
from allranks.parallel.batchnorm import has_batch_statistics, statistics_fixed, uses_batch_statistics
from allranks.parallel.compiled import uncompiled
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones
from allranks.stepping.evaluation_mode import evaluation_mode
from allranks.stepping.passes import Forward, buffers_kept
from allranks.stepping.start_check import Meeting, first_samples
from allranks.stepping.world import Processes
from allranks.task import has_step
from allranks.verdict import Decision

LEAST = 2
"""Samples of a forward, of which a BatchNorm's statistics may be taken."""


def fit_last_step(stream: DataStream, meeting: Meeting, processes: Processes) -> Meeting:
    """Cut a short last step into forwards that BatchNorm can do, and refuse one that has none; collective.

    Returns:
        `meeting`, which says so where that is not known: a step() of the Task's own makes its forwards itself.

    Raises:
        ConfigError: on every rank: the last step has too few samples.
    """
    forward, spread = meeting.forward, meeting.forward.spread
    if not has_batch_statistics(spread.modules):
        return meeting
    size, needed = size_of_last(stream), _needed(stream.cut, spread)
    stream.cut = replace(stream.cut, least=needed)
    if size is None or size >= needed or stream.steps_total is None:
        return meeting
    what = f"the last of {stream.steps_total} steps has {size} sample{'s' * (size > 1)}"
    remedy = f"train.steps={stream.steps_total - 1} leaves it out"
    if has_step(forward.task):
        said = Decision(what, f"a BatchNorm that sees single numbers would need {needed}; {remedy}")
        return replace(meeting, decisions=(*meeting.decisions, said))
    names = everyones(_sees_one_value(forward, stream), processes.world_group, processes.device)
    if name := next(filter(None, names), ""):
        raise ConfigError(
            f"{what}, and BatchNorm {name!r} needs {needed}, as it sees one number of each channel in a sample: "
            f"{remedy}"
        )
    return meeting


def size_of_last(stream: DataStream) -> int | None:
    """The samples of the last step, where it is a short one that is made; None where not, or where nobody knows."""
    total = stream.samples_total
    if total is None:
        return None
    left = total - stream.left_out.before(total) - stream.seen
    size = left % stream.cut.global_batch
    made = stream.steps_limit is None or stream.step + -(-left // stream.cut.global_batch) <= stream.steps_limit
    return size if left > 0 and size and made else None


def _needed(cut: Cut, spread: Spread) -> int:
    """Samples of a forward over all ranks, of which each statistic has `LEAST`, whether it is of all or of one rank."""
    return LEAST if spread.batch_norms.mode in (None, "sync") else LEAST * cut.num_ranks


def _sees_one_value(forward: Forward, stream: DataStream) -> str:
    """The first BatchNorm here that gets one number a channel from a forward of one sample; "" where none does."""
    spread, found = forward.spread, list[str]()
    samples, _ = first_samples(stream.dataset, stream.seed, 1)
    module = spread.bare()

    def look(name: str, arguments: tuple[Any, ...]) -> None:
        if arguments and arguments[0].dim() > 1 and arguments[0].numel() == arguments[0].size(1):
            found.append(name)

    with ExitStack() as entered:
        for name, part in module.named_modules():
            if uses_batch_statistics(part):
                entered.callback(_watch(part, name, look).remove)
        kept = evaluation_mode((module,)), buffers_kept(spread, unless=False), statistics_fixed(module)
        for context in (uncompiled(), *kept, torch.no_grad()):
            entered.enter_context(context)
        forward.raw(forward.place(plain_batch(forward.task.collate(samples))), module)
    return found[0] if found else ""


def _watch(part: nn.Module, name: str, look: Any) -> torch.utils.hooks.RemovableHandle:
    return part.register_forward_pre_hook(lambda _, arguments: look(name, arguments))
