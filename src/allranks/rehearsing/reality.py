"""The step that was rehearsed, made by real processes and measured: what a dry run is held against.

Memory is what torch's allocator says over one step in its steady state (the profiler's memory events), beside the bytes
of what lies between two steps; messages are counted where torch dispatches them.
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
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.data.micro_step import StepBatch
from allranks.parallel.replicate import REPLICAS
from allranks.parallel.step_record import collective_name, received_bytes
from allranks.rehearsing.groups import GroupNames
from allranks.rehearsing.rank_step import local
from allranks.rehearsing.watch import sent_bytes
from allranks.stepping.session import Session

WARM_STEPS = 2


@final
@dataclass(frozen=True)
class Measured:
    """One real rank's step.

    Attributes:
        peak_bytes: most memory in use; resting_bytes: between steps.
        collectives: "axis op" -> (bytes received, count).
    """

    peak_bytes: int
    resting_bytes: int
    collectives: Mapping[str, tuple[int, int]]


def measure_step(session: Session) -> Measured:
    """The third step is measured, the fourth one's messages are counted; collective, on the CPU."""
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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
        before.read()
    gained = _highest(profiled)
    counter = _Counter(session)
    with counter:
        step()
    before.read()
    return Measured(resting + gained, resting, {name: (b, n) for name, (b, n) in counter.found().items()})


def resting_bytes(session: Session, batch: StepBatch) -> int:
    """Parameters, buffers, optimizer state, the batch and the buckets that DDP keeps gradients in."""
    spread = session.spread
    held = [local(tensor.detach()) for tensor in spread.tensors.values() if not tensor.is_meta]
    leaves = pytree.tree_leaves([one.batch for one in batch.micro_steps])
    held += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for optimizer in session.optimizers.by_name.values():
        states = (value for state in optimizer.state.values() for value in state.values())
        held += [local(value) for value in states if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
    buckets = 0
    if any(isinstance(module, REPLICAS) for module in spread.modules.values()):
        alone = spread.experts.parameters if spread.experts is not None else {}
        reduced = [p for p in spread.trainable().values() if id(p) not in alone]
        buckets = sum(p.numel() * p.element_size() for p in reduced)
    return sum(storages.values()) + buckets


def _highest(profiled: Any) -> int:
    """The most that was allocated and not given back, from the profiler's events in their order."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


class _Counter(TorchDispatchMode):
    """Counts collectives by axis and kind."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = GroupNames(session.spread.mesh)
        agreement = session.processes.agreement
        self._ignored = None if agreement is None else agreement.group_name
        self._bytes: Counter[str] = Counter()
        self._count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
            if boxed is not None and func._schema.name != "c10d::barrier":
                self._add(func._schema.name.removeprefix("c10d::"), dist.ProcessGroup.unbox(boxed), args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        if group.group_name == self._ignored:
            return
        key = f"{self._names.axis(group)} {collective_name(name)}"
        self._bytes[key] += sent_bytes(args) if name == "send" else received_bytes(name, group, args)
        self._count[key] += 1

    def found(self) -> dict[str, tuple[int, int]]:
        """Name -> (bytes, count)."""
        return {name: (self._bytes[name], number) for name, number in sorted(self._count.items())}
