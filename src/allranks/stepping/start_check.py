"""What is found out on a few samples before the first step.

What forward gets, how targets are counted, what the loss is, and whether it leaves parameters without a gradient.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import item_key, seed_all
from allranks.data.second_pass import begin_pass, check_begins_anew, check_second_pass
from allranks.data.stream import declared_order
from allranks.errors import AllranksError, DataError, LayoutError, MemoryShortError, TaskError
from allranks.failure import is_out_of_memory
from allranks.layout import Layout
from allranks.parallel.compiled import uncompiled
from allranks.parallel.context import Context
from allranks.parallel.data_parallel import describe_gathering
from allranks.parallel.spread import Spread
from allranks.parallel.tensor_uses import uses_of_parts
from allranks.stepping.alike import everyones, on_any_rank
from allranks.stepping.buffer_check import check_buffers
from allranks.stepping.evaluate import measure
from allranks.stepping.flops import count_flops
from allranks.stepping.forward_only import forward_only
from allranks.stepping.loss_check import NUM_SAMPLES, examine_loss, num_examined
from allranks.stepping.loss_nature import LossNature
from allranks.stepping.passes import Forward, buffers_kept
from allranks.stepping.position_check import check_positions
from allranks.stepping.sequence_loss import check_sequence_loss
from allranks.stepping.transfer_cost import TransferCost, measure_transfers
from allranks.stepping.uncompared import UNCOMPARED, pass_uncompared
from allranks.stepping.unused_search import search_unused
from allranks.stepping.whole_check import check_whole
from allranks.task import Task, has_step, resolve_inputs, resolve_targets
from allranks.units import format_seconds
from allranks.users_code import user_line
from allranks.verdict import Decision

CHEAP_SECONDS = 0.3e-3
SEEDINGS = 32
FEW = 2  # samples where a whole output is kept

COUPLED = "the loss couples samples"

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Meeting:
    """What is known once the Task has met its data.

    Attributes:
        coupled: whether the loss couples the samples of a forward.
        gathers: whether it asks for the rows of the other ranks; a `step` may, and is watched when it runs.
        forward: the user's forward and loss.
        count_targets: batch -> number of targets; None where `step` counts them itself.
        flops_per_sample: of a forward and a backward; None where they cannot be counted.
        transfers: between the devices of this process; None where it has one, or `step` makes its own forwards.
    """

    coupled: bool
    gathers: bool
    forward: Forward
    count_targets: Callable[[Any], int] | None
    decisions: tuple[Decision, ...]
    flops_per_sample: float | None = None
    transfers: TransferCost | None = None


def check_at_start(
    task: Task,
    spread: Spread,
    dataset: Any,
    seed: int,
    *,
    draws: bool,
    group: Group,
    micro_batch: int,
) -> Meeting:
    """Find out, on the first samples of the dataset; collective.

    Forwards of several samples save nothing for a backward. What goes backward is a micro-batch, or two or three
    samples where the model is compared with the whole one or what moves between devices is counted.

    Args:
        micro_batch: samples of a forward in training.
        draws: whether loading an item may draw random numbers.
        group: the data-parallel ranks; None for one.

    Raises:
        TaskError: the Task breaks its contract on them; the user's own line is shown.
        LayoutError: each rank would learn other buffers from its own samples; or sequences that cp cannot cut.
        DataError: there are none.
    """
    check_step(task, spread)
    if has_step(task):
        check_begins_anew(dataset, seed)
        unknown = pass_uncompared(spread, f"{type(task).__name__} has a step() of its own")
        said = (unknown,) if spread.mesh.layout.cuts_model else ()
        return Meeting(task.coupled, task.coupled, Forward(task, spread, lambda batch: (batch,)), None, said)
    loaded = False
    try:
        samples, seconds = first_samples(dataset, seed, num_examined(micro_batch))
        batch = plain_batch(task.collate(list(samples)))
        loaded = True  # memory that ran out before is what the dataset has taken
        with uncompiled(), uses_of_parts(spread):
            apart = group if declared_order(dataset) == "sharded" else None
            meeting = _meet(task, spread, samples, batch, apart, seed, micro_batch)
    except AllranksError:
        raise
    except Exception as error:
        if loaded and is_out_of_memory(error):
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            what = f"memory ran out at the start, where the loss of {num_examined(micro_batch)} samples is looked at"
            moves = "smaller samples, layout.recompute=full, or a layout that shards more or cuts the logits"
            raise MemoryShortError(f"{what} ({first}): use {moves}", divisible=False) from error
        failed = f"{type(task).__name__} fails on the first samples of its dataset"
        raise TaskError(f"{failed}:\n{user_line(error)}") from error
    if not draws or seconds >= CHEAP_SECONDS:
        return meeting
    return replace(meeting, decisions=(*meeting.decisions, _describe_seeding(dataset)))


def check_step(task: Task, spread: Spread) -> None:
    """See that the modules and the layout go with the Task's way of making a step, before any sample is looked at.

    Raises:
        TaskError: several modules without a step(); or one under a pipeline.
        LayoutError: a step() whose sequences would be cut.
    """
    name, layout = type(task).__name__, spread.mesh.layout
    if not has_step(task):
        if "" not in spread.modules:
            what = f"model() returned several modules ({', '.join(spread.modules)})"
            raise TaskError(f"{what}: {name} needs a step(models, batch)")
        return
    if spread.stages is not None:
        raise TaskError(
            f"{name} has a step() of its own, and pp={layout.pp} orders forwards and backwards itself: write "
            "loss(output, batch), or use another layout"
        )
    if spread.context is not None:
        raise LayoutError(
            f"{layout} cuts the batch of one forward and one loss, and {name} has a step() of its own: leave cp out"
        )


def _meet(
    task: Task, spread: Spread, samples: list[Any], batch: Any, group: Group, seed: int, micro_batch: int
) -> Meeting:
    """`group`: of ranks that see other samples each, and could decide otherwise; None where all see the same."""
    module = spread.bare()
    inputs, targets = resolve_inputs(task, module, batch), resolve_targets(task, batch)
    forward = Forward(task, spread, inputs.call)
    said = () if spread.context is None else (_meet_context(spread.context, task, batch, inputs.call),)
    examine = partial(
        examine_loss,
        task,
        module,
        samples,
        inputs=inputs.call,
        targets=targets.call,
        place=forward.place,
        autocast=forward.autocast,
        compute=spread.precision.compute,
        call=None if spread.stages is None else lambda placed: forward.raw(placed, module),
        collective=spread.mesh.layout.cuts_model or spread.mesh.layout.fully_sharded,
    )
    nature = forward_only(examine)
    nature = _from_last_stage(nature, spread)
    # A forward whose backward never came leaves gathered parameters behind.
    spread.reshard()
    check_buffers(forward, samples, group)
    coupled = on_any_rank(nature.kind == "coupled", spread.device, group)
    if spread.context is not None:  # each of these ranks has examined other positions
        coupled = on_any_rank(coupled, spread.device, spread.context.group)
    alike = coupled == (nature.kind == "coupled")
    decisions: tuple[Decision, ...] = (
        *said,
        _describe(task, "inputs", "forward gets", inputs.because),
        _describe(task, "targets", "targets are", targets.because),
        Decision(
            COUPLED if coupled else "the loss is a sum",
            nature.because if alike else "it does so on another process, which sees other samples",
        ),
    )
    if spread.context is not None:
        measured = None if type(task).metrics is Task.metrics else partial(measure, task)
        what = f"{len(samples)} samples"
        decisions += (check_sequence_loss(forward, batch, task.loss, what=what, metrics=measured),)
    flops = count_flops(forward, batch, len(samples))
    decisions += search_unused(forward, samples, micro_batch, group)
    if spread.mesh.layout.kind == "data_parallel":
        decisions += (_describe_gathering(forward, batch, len(samples)),)
    if spread.mesh.layout.cuts_model:
        alike = group is None
        unknown = "each data-parallel rank sees samples of its own at the start"
        whole = check_whole(forward, samples, seed, flops) if alike else pass_uncompared(spread, unknown)
        decisions += (whole,)
        if spread.context is not None and whole.what == UNCOMPARED:
            few = samples[:FEW]
            decisions += (check_positions(forward, plain_batch(task.collate(few)), what=f"{len(few)} samples"),)
    transfers = measure_transfers(forward, samples)
    return Meeting(coupled, nature.gathers, forward, targets.call, decisions, flops, transfers)


def _from_last_stage(nature: LossNature, spread: Spread) -> LossNature:
    """What the ranks have found that have the output; collective along pp."""
    if spread.stages is None:
        return nature
    told = everyones(asdict(nature), spread.stages.group, spread.device)
    return next(LossNature(**one) for one in told if one["kind"] != "elsewhere")


def _meet_context(context: Context, task: Task, batch: Any, inputs: Callable[[Any], Any]) -> Decision:
    return context.meet(batch, inputs(batch), task.hints().sequence_dims)


@torch.no_grad()
def _describe_gathering(forward: Forward, batch: Any, num_samples: int) -> Decision:
    with buffers_kept(forward.spread, unless=False):
        output = forward(forward.place(batch))
    return describe_gathering(output, num_samples, torch.cuda.device_count())


def _describe(task: Task, method: str, verb: str, because: str) -> Decision:
    if getattr(type(task), method) is not getattr(Task, method):
        return Decision(f"{verb} what {method}() returns", because)
    return Decision(f"{verb} {because}", f"{type(task).__name__} has no {method}() of its own")


def _describe_seeding(dataset: Any) -> Decision:
    """Where samples are cheap, what law 6 costs each of them here."""
    started = perf_counter()
    for key in range(SEEDINGS):
        seed_all(key)
    cost = format_seconds((perf_counter() - started) / SEEDINGS)
    name = type(dataset).__name__
    because = f"{name} may draw random numbers; where it draws none, `draws = False` on it spares that"
    return Decision(f"three generators are seeded before each sample, {cost} a time", because)


def check_coupling(task: Task, meeting: Meeting, layout: Layout) -> None:
    """Refuse a loss that couples samples where each rank would couple its own only. Raises LayoutError."""
    if not meeting.coupled or layout.dp == 1:
        return
    if layout.local_sgd is not None:
        raise LayoutError(
            f"the loss of {type(task).__name__} couples samples, and with layout.local_sgd={layout.local_sgd} copies "
            "train by themselves between two meetings: leave it out, or use --nproc 1"
        )
    if task.coupled and meeting.gathers and layout.cp == 1:
        return
    if layout.cp > 1:
        raise LayoutError(
            f"the loss of {type(task).__name__} couples samples, and cp={layout.cp} gives each rank other positions of "
            "them: leave cp out, or use --nproc 1"
        )
    because = next((d.because for d in meeting.decisions if d.what == COUPLED), "the Task says so")
    raise LayoutError(
        f"the loss couples the samples of a batch ({because}), and each of {layout.dp} data-parallel ranks would "
        "couple its own only: take the rows of all ranks by self.world.gather(rows) and say coupled = True, or use "
        "--nproc 1"
    )


def first_samples(dataset: Any, seed: int, number: int = NUM_SAMPLES) -> tuple[list[Any], float]:
    """The dataset's first few samples, each loaded under its own key as in training, and the seconds of the fastest.

    DataError where there is no sample, and for an iterable that does not begin anew: training would miss these.
    """
    is_map = declared_order(dataset) == "map"
    found = map(dataset.__getitem__, range(len(dataset))) if is_map else begin_pass(dataset, seed)
    samples: list[Any] = []
    seconds: list[float] = []
    for index in range(number):
        seed_all(item_key(seed, 0, index))
        started = perf_counter()
        samples += islice(found, 1)
        seconds += [perf_counter() - started] * (len(samples) > len(seconds))
    if not samples:
        raise DataError(f"{type(dataset).__name__} is empty: there is no sample to train on")
    if not is_map:
        check_second_pass(dataset, seed, found, samples[0])
    return samples, min(seconds)
