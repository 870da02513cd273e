"""The second pass of `allranks verify TASK`: the first step in the run's own low precision, on both sides.

Logic is judged in float64 before. Here one device runs under autocast, and again with what changes nothing but the
rounding, always with the routing of its first run; so do the ranks, from the same parameters and samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch

from allranks.request import TrainRequest
from allranks.stepping.scaler import INITIAL_SCALE
from allranks.surviving.launch import launch
from allranks.training.prepare import prepare, resolve_layout
from allranks.verifying import observation as look
from allranks.verifying.choosing import Choosing
from allranks.verifying.recording import OneDevice, RunRecord
from allranks.verifying.routing import Recorded, Recorder, Replayer
from allranks.verifying.shrinking import shrink
from allranks.verifying.task_alone import TaskAlone, Variation
from allranks.verifying.task_ranks import Errand, TaskRecord, run_task_rank, shorten_validation

LOWERED: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
VARIATIONS: Final = (Variation(shake=1, shuffled=True), Variation(shake=2, shuffled=True), Variation(apart=True))
PLAIN: Final = Variation()
ROOM: Final = 4.0  # between the scale that is used and the largest one that is known to fit in float16


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


def run_lowered(request: TrainRequest, errand: Errand, nproc: int) -> Lowered:
    """One step of `request`, whose precision is a low one, on one device and on the ranks."""
    low = replace(errand, request=request, num_steps=1, save_after=None, folder=f"{errand.folder}-low", evaluate=False)
    alone: LoweredOne = launch(run_alone_lowered, low, nproc=1)[0]
    precision = prepare(request).config.train.precision
    if not alone.fits:
        said = alone.one.run.error or "its gradients are not finite on one device"
        return Lowered(alone.one, [], f"not compared in {precision}: {said}", comparable=False)
    told = replace(low, scale=alone.scale, recorded=alone.recorded)
    ranks: list[TaskRecord] = launch(run_task_rank, told, nproc=nproc)
    if LOWERED[precision] is torch.float16 and not all(_is_finite(record.run) for record in ranks):
        return Lowered(alone.one, ranks, f"not compared in {precision}: its first step overflows", comparable=False)
    replayed = sum(record.replayed for record in ranks)
    ties = f"; {replayed} near-ties of its routing were decided as on one device" if replayed else ""
    return Lowered(alone.one, ranks, f"and the first step in {precision}{ties}")


def run_alone_lowered(errand: Errand) -> LoweredOne:
    """One device under autocast, and with what rounding in it moves; in a process that `launch` has started."""
    prepared = prepare(errand.request)
    lowered = LOWERED[prepared.config.train.precision]
    layout = resolve_layout(prepared.config, errand.request.nproc or 1, 1)
    shorten_validation(prepared.task)
    shrink(prepared.task, errand.keep)
    observer = look.Observer()
    with observer.watching():

        def run(variation: Variation, scale: float, choosing: Choosing | None = None) -> RunRecord:
            given = prepared.task, prepared.config, 1, observer, variation, lowered, scale, choosing
            return TaskAlone(*given).run()

        scale = 1.0
        if lowered is torch.float16:
            scale = next((s for s in _scales() if _is_finite(run(PLAIN, ROOM * s))), 1.0)
        # What is compiled is not looked into: then nothing is recorded, on neither side.
        recorder = Recorder() if layout.compile == "none" else None
        first = run(PLAIN, scale, None if recorder is None else Choosing(recorder.decide))
        if not _is_finite(first):
            return LoweredOne(OneDevice(first), fits=False)
        recorded = {} if recorder is None else recorder.recorded()
        again = [run(v, scale, Choosing(Replayer(recorded, lowered).decide) if recorded else None) for v in VARIATIONS]
        return LoweredOne(OneDevice(first, [v for v in again if _is_finite(v)]), scale, recorded)


def _scales() -> Iterator[float]:
    """Factors on the loss to be tried, the largest first, which is where the run's own begins."""
    scale = INITIAL_SCALE
    while scale >= 1.0:
        yield scale
        scale /= ROOM


def _is_finite(run: RunRecord) -> bool:
    parts = [part for step in run.steps[:1] for part in step.raw.values()]
    return bool(run.steps) and not run.error and all(bool(part.value.isfinite().all()) for part in parts)
