"""The second pass of `allranks verify TASK`: the first step in the run's own low precision, on both sides.

Logic is judged in float64 before. Here one device runs under autocast, and again with what changes nothing but the
rounding, always with the routing of its first run; so do the ranks, from the same parameters and samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch

from allranks.layout import Layout
from allranks.request import TrainRequest
from allranks.stepping.scaler import INITIAL_SCALE
from allranks.surviving.launch import launch_without_gpus
from allranks.training.prepare import prepare, resolve_layout
from allranks.verifying.choosing import Choosing
from allranks.verifying.observer import Observer
from allranks.verifying.pieces import Pieces
from allranks.verifying.recording import OneDevice, RunRecord
from allranks.verifying.routing import Recorded, Recorder, Replayer
from allranks.verifying.shrinking import shrink
from allranks.verifying.task_alone import TaskAlone, Variation
from allranks.verifying.task_ranks import Errand, TaskRecord, run_task_rank, shorten_validation

LOWERED: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROOM: Final = 4.0  # between the scale that is used and the largest one that is known to fit in float16


@final
@dataclass(frozen=True)
class Rounding:
    """How a run rounds.

    Attributes:
        variation: of the run.
        pieces: in which each product of matrices is computed.
    """

    variation: Variation
    pieces: int = 1


PLAIN: Final = Variation()
APART: Final = Variation(apart=True)
PIECES: Final = (2, 3, 4)
SHAKES: Final = tuple(Rounding(Variation(shake=number, shuffled=True)) for number in (1, 2))
IN_ORDER: Final = tuple(Rounding(Variation(shake=number)) for number in (1, 2))
"""Both move the parameters, and so what is computed: by more than rounding does, which both sides do to equal ones."""


def roundings(layout: Layout) -> list[Rounding]:
    """What a spread run may do otherwise: how many samples a forward has, and how a product is added up.

    The last one rounds nothing, so that it is as far from the first as that is from the truth, whatever the kernels.
    """
    numbers = dict.fromkeys((*PIECES, max(layout.tp, PIECES[-1])))
    in_pieces = (Rounding(PLAIN, number) for number in numbers)
    return [Rounding(APART), *in_pieces, Rounding(APART, 6), Rounding(Variation(exact=True))]


@final
@dataclass(frozen=True)
class LoweredOne:
    """What one device computes in a low precision.

    Attributes:
        scale: of its losses.
        recorded: what it has chosen.
        fits: whether its first step is finite.
    """

    one: OneDevice
    scale: float = 1.0
    recorded: Recorded | None = None
    fits: bool = True


@final
@dataclass(frozen=True)
class Lowered:
    """What both sides have computed.

    Attributes:
        note: what was compared, or why nothing was.
        comparable: whether there is something to compare.
    """

    one: OneDevice
    ranks: Sequence[TaskRecord]
    note: str
    comparable: bool = True


def run_lowered(request: TrainRequest, errand: Errand, nproc: int, *, ordered: bool = False) -> Lowered:
    """One step of `request`, whose precision is a low one, on one device and on the ranks.

    Args:
        ordered: whether the order of the samples in a batch means something.
    """
    low = replace(errand, request=request, num_steps=1, saves=(), folder=f"{errand.folder}-low", evaluate=False)
    alone: LoweredOne = launch_without_gpus(run_alone_lowered, low, ordered, nproc=1)[0]
    precision = prepare(request).config.train.precision
    if not alone.fits:
        said = alone.one.run.error or "its gradients are not finite on one device"
        return Lowered(alone.one, [], f"not compared in {precision}: {said}", comparable=False)
    told = replace(low, scale=alone.scale, recorded=alone.recorded)
    ranks: list[TaskRecord] = launch_without_gpus(run_task_rank, told, nproc=nproc)
    if LOWERED[precision] is torch.float16 and not all(_is_finite(record.run) for record in ranks):
        return Lowered(alone.one, ranks, f"not compared in {precision}: its first step overflows", comparable=False)
    replayed = sum(record.replayed for record in ranks)
    ties = f"; {replayed} near-ties of its routing were decided as on one device" if replayed else ""
    return Lowered(alone.one, ranks, f"and the first step in {precision}{ties}")


def run_alone_lowered(errand: Errand, ordered: bool = False) -> LoweredOne:
    """One device under autocast, and with what rounding in it moves; in a process that `launch` has started."""
    prepared = prepare(errand.request)
    lowered = LOWERED[prepared.config.train.precision]
    layout = resolve_layout(prepared.config, errand.request.nproc or 1, 1)
    shorten_validation(prepared.task)
    shrink(prepared.task, errand.keep)
    observer = Observer(least_dims=errand.least_dims)
    seen: list[Pieces] = []
    with observer.watching():

        def run(rounding: Rounding, scale: float, choosing: Choosing | None = None) -> RunRecord:
            variation = rounding.variation
            if errand.stateful:
                variation = replace(variation, forwards=errand.forwards)
            if errand.stateful or ordered:  # one by one, samples would be another computation
                variation = replace(variation, apart=False)
            given = prepared.task, prepared.config, 1, observer, variation, lowered, scale, choosing
            with Pieces(rounding.pieces) as pieces:
                seen.append(pieces)
                return TaskAlone(*given).run()

        scale = 1.0
        if lowered is torch.float16:
            scale = next((s for s in _scales() if _is_finite(run(Rounding(PLAIN), ROOM * s))), 1.0)
        # What is compiled is not looked into: then nothing is recorded, on neither side.
        recorder = Recorder() if layout.compile == "none" else None
        first = run(Rounding(PLAIN), scale, None if recorder is None else Choosing(recorder.decide))
        if not _is_finite(first):
            return LoweredOne(OneDevice(first), fits=False)
        recorded = {} if recorder is None else recorder.recorded()

        def again(some: Sequence[Rounding]) -> list[RunRecord]:
            return [run(r, scale, Choosing(Replayer(recorded, lowered).decide) if recorded else None) for r in some]

        others = again(roundings(layout))
        if needs_shakes(layout, seen):
            others += again(IN_ORDER if ordered else SHAKES)
        return LoweredOne(OneDevice(first, _distinct(first, others)), scale, recorded)


def needs_shakes(layout: Layout, seen: Sequence[Pieces]) -> bool:
    """Whether products in pieces leave something out: rounded parameters of the ranks, other kernels of the model."""
    return layout.gather == "bfloat16" or any(one.whole for one in seen) or not any(one.cut for one in seen)


def _distinct(first: RunRecord, others: Sequence[RunRecord]) -> list[RunRecord]:
    """Those that are finite, and no copy of another: a copy says nothing of rounding, and would count as a run."""
    kept = [first]
    for run in others:
        if _is_finite(run) and not any(_same(run, other) for other in kept):
            kept.append(run)
    return kept[1:]


def _same(run: RunRecord, other: RunRecord) -> bool:
    here, there = run.steps[0].raw, other.steps[0].raw
    return here.keys() == there.keys() and all(
        torch.equal(part.value, there[name].value) for name, part in here.items()
    )


def _scales() -> Iterator[float]:
    """Factors on the loss to be tried, the largest first, which is where the run's own begins."""
    scale = INITIAL_SCALE
    while scale >= 1.0:
        yield scale
        scale /= ROOM


def _is_finite(run: RunRecord) -> bool:
    parts = [part for step in run.steps[:1] for part in step.raw.values()]
    return bool(run.steps) and not run.error and all(bool(part.value.isfinite().all()) for part in parts)
