"""The step that was rehearsed, made by real processes and measured: what a dry run is held against.

On the CPU memory is what torch's allocator says over a step in its steady state (the profiler's memory events), beside
the bytes of what lies between two steps; what gloo holds for longer than it uses it is left out (GlooAtRest). What lies
there is known by name: a profiler does not see memory go that was there before it. So what a step leaves behind is
told, too: a step before it has left the same. Messages are counted where torch dispatches them. On a GPU its allocator
keeps both figures by itself.
"""

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from allranks.data.micro_step import StepBatch
from allranks.parallel.replicate import REPLICAS
from allranks.parallel.seen_collectives import Collectives, collective_name, moved_bytes
from allranks.rehearsing.gloo_lag import GlooAtRest
from allranks.rehearsing.groups import GroupNames
from allranks.rehearsing.rank_step import local
from allranks.stepping.session import Session

WARM_STEPS = 2
MEASURED_STEPS = 3  # the least of them: the first may still make what the others find


@final
@dataclass(frozen=True)
class Measured:
    """One real rank's step.

    Attributes:
        peak_bytes: most memory in use; resting_bytes: between steps.
        left_bytes: made in a step and still there after it; where that is much, both others lack it.
        collectives: "axis op" -> (bytes received, count).
        reserved_bytes: the most that a GPU's allocator has taken from it; 0 on the CPU.
    """

    peak_bytes: int
    resting_bytes: int
    left_bytes: int
    collectives: Mapping[str, tuple[int, int]]
    reserved_bytes: int = 0


def measure_step(session: Session) -> Measured:
    """After two steps some are measured, and the messages of one more are counted; collective, on the CPU."""
    with session.loader() as loader:
        batch: StepBatch = next(loader)
    before = session.step.agree_first(batch)

    def step() -> None:
        nonlocal before
        before = session.step.run(batch, before, lambda: batch).pending

    for _ in range(WARM_STEPS):
        step()
    before.read()
    gc.collect()
    resting = resting_bytes(session, batch)
    gained, left = [], []
    for _ in range(MEASURED_STEPS):
        activities = [ProfilerActivity.CPU]
        # torch 2.11 warns of events of earlier cycles without acc_events; there is one cycle.
        with profile(activities=activities, profile_memory=True, acc_events=True) as profiled, GlooAtRest():
            step()
            before.read()
        highest, now = _follow(profiled)
        gained.append(highest)
        left.append(now)
    counter = _Counter(session)
    with Collectives(counter.add):
        step()
    before.read()
    return Measured(resting + min(gained), resting, min(left), counter.found())


def measure_cuda_step(session: Session) -> Measured:
    """The same on a GPU, whose allocator says what was allocated and reserved at most; collective.

    What an H200 said stands in docs/explanation/measured.md.
    """
    with session.loader() as loader:
        batch: StepBatch = next(loader)
    device = session.processes.choice.device
    before = session.step.agree_first(batch)

    def step() -> None:
        nonlocal before
        before = session.step.run(batch, before, lambda: batch).pending

    for _ in range(WARM_STEPS):
        step()
    before.read()
    gc.collect()
    torch.cuda.synchronize(device)
    resting = torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()  # what the first steps alone have needed
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(MEASURED_STEPS):
        step()
        before.read()
    torch.cuda.synchronize(device)
    highest, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    counter = _Counter(session)
    with Collectives(counter.add):
        step()
    before.read()
    return Measured(highest, resting, 0, counter.found(), reserved)


def resting_bytes(session: Session, batch: StepBatch) -> int:
    """Parameters, buffers and the guard's copies, optimizer state, the batch, DDP's buckets, what stages receive into.

    With the gradients of what they received, where these stay."""
    spread = session.spread
    held = [local(tensor.detach()) for tensor in spread.tensors.values() if not tensor.is_meta]
    leaves = pytree.tree_leaves([one.batch for one in batch.micro_steps])
    held += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for optimizer in session.optimizers.by_name.values():
        states = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
        held += [local(value) for value in states if isinstance(value, torch.Tensor)]
    held += [] if session.step.guard is None else session.step.guard.held
    if spread.stages is not None:
        into = spread.stages.scheduler.received_into
        # torch's schedules that cut the backward in two drop these only when the next step begins.
        held += [*into, *(buffer.grad for buffer in into if buffer.grad is not None)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
    buckets = 0
    if any(isinstance(module, REPLICAS) for module in spread.modules.values()):
        alone = spread.experts.parameters if spread.experts is not None else {}
        reduced = [p for p in spread.trainable().values() if id(p) not in alone]
        buckets = sum(p.numel() * p.element_size() for p in reduced)
    return sum(storages.values()) + buckets


def _follow(profiled: Any) -> tuple[int, int]:
    """The most that was allocated and not given back, and what is left, from the profiler's events in their order."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest, now


class _Counter:
    """Counts collectives by axis and kind."""

    def __init__(self, session: Session) -> None:
        self._names = GroupNames(session.spread.mesh)
        agreement = session.processes.agreement
        self._ignored = None if agreement is None else agreement.group_name
        self._bytes: Counter[str] = Counter()
        self._count: Counter[str] = Counter()

    def add(self, name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        """One collective, as torch dispatches it."""
        if group.group_name == self._ignored:
            return
        key = f"{self._names.axis(group)} {collective_name(name)}"
        self._bytes[key] += moved_bytes(name, group, args)
        self._count[key] += 1

    def found(self) -> dict[str, tuple[int, int]]:
        """Name -> (bytes, count)."""
        return {name: (self._bytes[name], number) for name, number in sorted(self._count.items())}
