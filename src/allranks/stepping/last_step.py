"""The last step of `train.epochs`, which is short where the samples do not divide: has BatchNorm enough of them?

A BatchNorm over rows of numbers has nothing to normalise where a forward has one of them, and torch raises ValueError.
Met in the last step that would lose the run, and each resume would meet it again. A BatchNorm over images or sequences
has many values for each channel of a single sample.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

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


@final
@dataclass(frozen=True, slots=True)
class ShortStep:
    """A last step that has too few samples for a BatchNorm of rows.

    Attributes:
        steps_total: of the run, this one included.
        size: its samples.
        needed: what it would have to have.
    """

    steps_total: int
    size: int
    needed: int

    @property
    def what(self) -> str:
        """What there is."""
        return f"the last of {self.steps_total} steps has {self.size} sample{'s' * (self.size > 1)}"

    def refusal(self, name: str, remedy: str) -> ConfigError:
        """Of a model whose BatchNorm `name` gets one number of each channel from a sample."""
        return ConfigError(
            f"{self.what}, and BatchNorm {name!r} needs {self.needed}, as it sees one number of each channel in a "
            f"sample: {remedy} leaves it out"
        )


def fit_last_step(stream: DataStream, meeting: Meeting, processes: Processes) -> Meeting:
    """Cut a short last step into forwards that BatchNorm can do, and refuse one that has none; collective.

    Returns:
        `meeting`, which says so where that is not known: a step() of the Task's own makes its forwards itself.

    Raises:
        ConfigError: on every rank: the last step has too few samples.
    """
    forward = meeting.forward
    short = cut_short_step(stream, (forward.spread,))
    if short is None:
        return meeting
    remedy = f"train.steps={short.steps_total - 1}"
    if has_step(forward.task):
        because = f"a BatchNorm that sees single numbers would need {short.needed}; {remedy} leaves it out"
        return replace(meeting, decisions=(*meeting.decisions, Decision(short.what, because)))
    names = everyones(_sees_one_value(forward, stream), processes.world_group, processes.device)
    if name := next(filter(None, names), ""):
        raise short.refusal(name, remedy)
    return meeting


def cut_short_step(stream: DataStream, spreads: Iterable[Spread]) -> ShortStep | None:
    """Cut a short last step into forwards that the BatchNorms of `spreads` can do; itself where it has none of them."""
    wanted = [_needed(stream.cut, spread) for spread in spreads if has_batch_statistics(spread.modules)]
    if not wanted:
        return None
    needed, size = max(wanted), size_of_last(stream)
    stream.cut = replace(stream.cut, least=needed)
    if size is None or size >= needed or stream.steps_total is None:
        return None
    return ShortStep(stream.steps_total, size, needed)


def size_of_last(stream: DataStream) -> int | None:
    """The samples of the last step, where it is a short one that is made; None where not, or where nobody knows."""
    total = stream.samples_total
    if total is None:
        return None
    left = total - stream.left_out.before(total) - stream.seen
    size = left % stream.cut.global_batch
    made = stream.steps_limit is None or stream.step + -(-left // stream.cut.global_batch) <= stream.steps_limit
    return size if left > 0 and size and made else None


def watch_batch_norms(module: nn.Module, look: Callable[[str, nn.Module, int], None]) -> list[RemovableHandle]:
    """From here on `look(name, BatchNorm, values)` hears how many values of each channel one of `module` gets."""

    def watch(name: str, part: nn.Module) -> RemovableHandle:
        def hear(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and arguments[0].dim() > 1:
                look(name, part, arguments[0].numel() // arguments[0].size(1))

        return part.register_forward_pre_hook(hear)

    return [watch(name, part) for name, part in module.named_modules() if uses_batch_statistics(part)]


def _needed(cut: Cut, spread: Spread) -> int:
    """Samples of a forward over all ranks, of which each statistic has `LEAST`: of all ranks, of a copy's, of one's."""
    layout = spread.mesh.layout
    together = layout.copies * layout.dp_shard if spread.batch_norms.mode in (None, "sync") else 1
    # Ranks differ by one sample at most, and those that have one more may all be another's.
    return LEAST * cut.num_ranks if together == 1 else LEAST + cut.num_ranks - together


def _sees_one_value(forward: Forward, stream: DataStream) -> str:
    """The first BatchNorm here that gets one number a channel from a forward of one sample; "" where none does."""
    spread, found = forward.spread, list[str]()
    samples, _ = first_samples(stream.dataset, stream.seed, 1)
    module = spread.bare()

    def look(name: str, _: nn.Module, values: int) -> None:
        if values == 1:
            found.append(name)

    with ExitStack() as entered:
        for handle in watch_batch_norms(module, look):  # before they are in evaluation mode, where they look at none
            entered.callback(handle.remove)
        kept = evaluation_mode((module,)), buffers_kept(spread, unless=False), statistics_fixed(module)
        for context in (uncompiled(), *kept, torch.no_grad()):
            entered.enter_context(context)
        forward.raw(forward.place(plain_batch(forward.task.collate(samples))), module)
    return found[0] if found else ""
