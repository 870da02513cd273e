"""A world of any size in one process: a process group whose messages go nowhere, and what has to step aside for it.

Three kinds of code cannot run on tensors without values, and are answered here, each by name:

    torch's DeviceMesh and our Mesh.peers    index the tensor of all ranks: they run outside of fakes
    what waits for other ranks' answers      votes (of pipelines, of step(), of spikes), headers, gloo's lines, counts
    DTensor's propagation of placements      gets a mode of its own, so that its whole shapes are not counted as ours

What else runs otherwise than in training (law 10) is listed in docs/explanation/decisions/rehearsing.md.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._sharding_prop as sharding_prop
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from allranks.errors import ConfigError
from allranks.parallel import expert, gather, gloo_ops, identity, parting, stages
from allranks.parallel.mesh import Mesh
from allranks.parallel.stage_schedule import Scheduler, View
from allranks.parallel.stage_transport import Sent, Signature, Transport
from allranks.process_environment import ProcessEnvironment, changed_environment
from allranks.rehearsing.crossings import Entries, hear
from allranks.stepping import alternating, scheduled, spikes

_ON_REAL_TENSORS = {"get_local_rank", "_flatten", "__getitem__", "size", "_get_slice_mesh_layout"}
_OURS_ON_REAL_TENSORS = (
    (Mesh, "peers"),
    (Mesh, "coordinate"),
    (stages, "_group_over"),
    (identity, "compute_local_shape_and_global_offset"),
)


@contextmanager
def fake_world(rank: int, size: int, backend: str, entries: Entries | None = None) -> Iterator[None]:
    """Inside, this process is `rank` of `size`, and every collective returns at once.

    Args:
        backend: "gloo" or "nccl", which the code is told that it runs on.
        entries: what the stages of its pipeline are sent; None: nobody knows yet.

    Raises:
        ConfigError: a process group runs here already.
    """
    if dist.is_initialized():
        raise ConfigError("a dry run makes a world of its own: call it where torch.distributed is not initialised")
    with _stepping_aside(backend, entries or {}), _forgetting_placements():
        if size == 1:
            yield
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def launched_as(process: ProcessEnvironment) -> Iterator[None]:
    """Inside, the environment says which process this is, as torchrun's and ours does to workers."""
    told = {
        "RANK": process.rank,
        "LOCAL_RANK": process.local_rank,
        "GROUP_RANK": process.node_rank,
        "WORLD_SIZE": process.world_size,
        "LOCAL_WORLD_SIZE": process.local_world_size,
        "GROUP_WORLD_SIZE": process.num_nodes,
    }
    with changed_environment({name: str(value) for name, value in told.items()}):
        yield


@contextmanager
def _forgetting_placements() -> Iterator[None]:
    """DTensor keeps placements with their mesh, and takes an equal mesh of a world that is gone for this one's."""
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        _clear_sharding_prop_cache()


@contextmanager
def _stepping_aside(backend: str, entries: Entries) -> Iterator[None]:
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(replaced(owner, name, value))

        def hear_here(transport: Transport, stage: int, signature: Signature) -> tuple[Sent, ...]:
            return hear(entries, transport, stage, signature)

        put(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)  # what fails is told in one line
        put(dist, "get_backend", lambda group=None: backend)
        put(DeviceMesh, "_concatenate", staticmethod(_on_real(DeviceMesh.__dict__["_concatenate"].__func__)))
        put(DeviceMesh, "mesh", property(_on_real(DeviceMesh.__dict__["mesh"].fget)))
        for name in vars(DeviceMesh).keys() & _ON_REAL_TENSORS:
            put(DeviceMesh, name, _on_real(vars(DeviceMesh)[name]))
        for owner, name in _OURS_ON_REAL_TENSORS:
            put(owner, name, _on_real(getattr(owner, name)))
        put(sharding_prop, "detect_fake_mode", lambda *args, **kwargs: None)
        put(gloo_ops, "open_lines", lambda module, mesh, apart: {})
        put(parting, "tell_beside", lambda watch: None)
        put(expert, "count_rows", _even_rows)
        put(View, "which", _Turns())
        put(Scheduler, "_run_scheduled", _holding_sent(Scheduler._run_scheduled))
        put(scheduled, "agree_on", _agree_with_oneself)
        put(alternating, "add_up", _add_up_alike)
        put(spikes, "on_any_rank", _on_any_as_here)
        put(gather, "_counts", _as_many_rows)
        put(Transport, "hear", hear_here)
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner` has another value there."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _on_real(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _even_rows(tokens: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> tuple[list[int], list[int]]:
    """Every expert gets as many tokens as every other one."""
    ranks = len(mine)
    whole, left = divmod(len(tokens), ranks)
    sent = [whole + (place < left) for place in range(ranks)]
    return sent, list(sent)


def _as_many_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """Every rank brings as many rows as this one."""
    mine = torch.tensor([len(rows), 0], dtype=torch.int64, device=rows.device)
    dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size(group))], mine, group=group)
    return [len(rows)] * dist.get_world_size(group)


def _agree_with_oneself(flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """All ranks have what this one has: the message is sent, and nobody's answer is read."""
    dist.all_reduce(torch.tensor([float(flag) for flag in flags], device=device), dist.ReduceOp.MIN, group)
    return list(flags)


def _add_up_alike(counts: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """All ranks count what this one does: as much, under the same names."""
    dist.all_reduce(torch.tensor(counts, dtype=torch.float64), group=group)
    return [dist.get_world_size(group) * count for count in counts]


def _on_any_as_here(flag: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """No rank has what this one has not."""
    if group is not None:
        dist.all_reduce(torch.tensor(float(flag), device=device), dist.ReduceOp.MAX, group)
    return flag


def _holding_sent(run_scheduled: Callable[..., None]) -> Callable[..., None]:
    def run(scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        # Here, because only a pipeline should bring torch's schedules along.
        from torch.distributed.pipelining import schedules

        with replaced(schedules, "_batch_p2p", _held(schedules._batch_p2p)):
            run_scheduled(scheduler, *args, **kwargs)

    return run


def _held(begin: Callable[..., list[dist.Work]]) -> Callable[..., list["_Held"]]:
    def run(ops: list[dist.P2POp], desc: str | None = None) -> list[_Held]:
        return [_Held(begin(ops, desc=desc), [op.tensor for op in ops])]

    return run


@dataclass(frozen=True)
class _Held:
    """Messages that keep their tensors for as long as a schedule keeps the messages, as those of gloo do.

    The schedules of several stages wait for all that they have sent at the end of a step. A fake message keeps nothing.
    (torch 2.11, ProcessGroupGloo.cpp, SendWork; NCCL's keep theirs until somebody waits, TensorShelf.)
    """

    works: list[dist.Work]
    tensors: list[torch.Tensor]

    def wait(self) -> None:
        """Until all have arrived."""
        for work in self.works:
            work.wait()


class _Turns:
    """The micro-steps of a stage come in their order in every step: a number without a value is known by its turn."""

    def __init__(self) -> None:
        # By a reference that keeps nothing alive: the function holds what the micro-steps had on this device.
        self._seen: dict[int, tuple[Callable[[], object], int]] = {}

    def __get__(self, view: View | None, owner: type | None = None) -> Callable[[torch.Tensor], int]:
        assert view is not None

        def which(number: torch.Tensor) -> int:
            compute = view.compute
            assert compute is not None
            step, turn = self._seen.get(id(view), (lambda: None, 0))
            turn = turn if step() is compute else 0  # each step computes by a function of its own
            self._seen[id(view)] = (weakref.ref(compute), turn + 1)
            return turn

        return which
