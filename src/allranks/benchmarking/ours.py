"""Our side: the session and the step of `allranks train`, told to journal and TensorBoard as by default.

The loop is `training.Trainer`'s without its boundaries (saving, evaluation, a stop): those are measured elsewhere.
"""

import time
from collections.abc import Callable, Iterator

from allranks.benchmarking.subject import Subject, make_config
from allranks.data.micro_step import StepBatch
from allranks.layout import Layout
from allranks.observing.counters import Stopwatch
from allranks.observing.recorder import Recorder, StepRecord
from allranks.parallel.backend import DeviceChoice
from allranks.process_environment import ProcessEnvironment
from allranks.stepping.agreement import Pending
from allranks.stepping.session import assemble
from allranks.stepping.step import Outcome
from allranks.stepping.world import gather_processes


def our_steps(
    layout: Layout,
    size: str,
    steps: int,
    environment: ProcessEnvironment,
    choice: DeviceChoice,
    recorder: Recorder | None,
) -> Iterator[Callable[[], float]]:
    """`steps` steps; each yields what gives its loss, over the whole batch and per token.

    Args:
        recorder: rank 0's pen; None elsewhere.
    """
    config = make_config(layout, steps)
    task = Subject(size=size, samples=steps * config.train.global_batch, experts=layout.ep > 1)
    stopwatch = Stopwatch()
    processes = gather_processes(environment, choice, layout)
    session = assemble(task, config, processes, stopwatch, lambda: (False, False))
    lag = choice.device.type == "cuda"
    with session.loader() as loader:
        first = next(loader)
        before = older = session.step.agree_first(first)
        batch: StepBatch | None = first
        while batch is not None:
            (older if lag else before).read()
            started = time.perf_counter()
            outcome = session.step.run(batch, before, lambda: next(loader, None))
            session.stream.take(batch)
            loss = _loss_of(outcome, before, batch)
            if recorder is not None:
                recorder.record(_record(batch, before, outcome, started, session.flops_per_sample))
            yield loss
            older, before, batch = before, outcome.pending, outcome.upcoming


def _loss_of(outcome: Outcome, before: Pending, batch: StepBatch) -> Callable[[], float]:
    return lambda: float(outcome.values(before, batch.size)["loss"])


def _record(
    batch: StepBatch, before: Pending, outcome: Outcome, started: float, flops_per_sample: float | None
) -> StepRecord:
    seconds = time.perf_counter() - started
    flops = None if flops_per_sample is None else flops_per_sample * batch.size
    ends_at = batch.position + batch.size
    values = outcome.values
    return StepRecord(
        batch.step + 1, ends_at, batch.size, outcome.lr, seconds, lambda: values(before, batch.size), flops
    )
