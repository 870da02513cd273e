"""Gathering and reduce-scattering over gloo by other operations than its own, which are slow.

Of 7 MB over loopback gloo's reduce_scatter takes longer than its all_reduce; an exchange of parts and a sum takes a
third to two thirds of that, and a broadcast of each part less than gloo's all_gather. bench/gloo.py measures it,
docs/explanation/measured.md has the figures. The parts are summed in the order of the ranks.

Nor does a unit wait for them: FSDP2 overlaps on streams, which a CPU has not. What a unit's backward needs next is on
its way while the unit before computes, and its own gradients travel while the next one computes.
"""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from allranks.parallel.heap import keep_heap
from allranks.parallel.parting import watch_path
from allranks.parallel.path import Path, wait_plainly

Wait = Callable[[dist.Work], object]
Line = dist.ProcessGroup | None

NO_TIMEOUT = timedelta()
SPARE = 0  # no unit's id: what a rank has to ask travels apart from all messages of units
MOST_LINES = 9  # groups with threads and sockets: units of further sizes share the first
# By the world that they are part of, and the groups that it is divided into.
_LINES = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], list[dist.ProcessGroup]]]()


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether tensors of this kind of device go through gloo in `group`, and lie where the host can add them."""
    return device_type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def gather_by_broadcasts(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, wait: Wait = wait_plainly
) -> dist.Work:
    """Fill `whole`, contiguous, with every rank's `part` in the order of ranks; returns what waits for it."""
    rank, parts = dist.get_rank(group), whole.view(dist.get_world_size(group), part.numel()).unbind()
    mine = parts[rank]
    if not _share_memory(mine, part):
        mine.copy_(part.view(-1))
    works = [dist.broadcast(one, group=group, group_src=source, async_op=True) for source, one in enumerate(parts)]
    return _Works(works, wait)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both begin at the same place; asked without an address, which tensors of a rehearsal have not."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset()


@final
class Exchange:
    """A sum of every rank's `whole`, contiguous, of which each rank gets its part; on its way once made.

    Args:
        part: what `finish` fills.
        group: of two ranks at least.
        divisor: of the sum.
        give_back: whether `whole` is of no use afterwards. A thread of gloo may hold on to what it has sent for as long
            as it does not come to run: its memory is given back for it.
    """

    def __init__(
        self,
        part: torch.Tensor,
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        divisor: int,
        wait: Wait = wait_plainly,
        *,
        give_back: bool = False,
    ) -> None:
        self._part, self._divisor, self._wait = part.view(-1), divisor, wait
        size, rank, num = dist.get_world_size(group), dist.get_rank(group), part.numel()
        parts = whole.view(size, num)
        # What stays is not sent: to have it twice would be seen in a step's peak of memory.
        received = torch.empty_like(parts[1:])
        # No products with bools: torch 2.11's compiler cannot multiply a size that varies by one.
        above = [num if other > rank else 0 for other in range(size)]
        below = [num if other < rank else 0 for other in range(size)]
        halves = [(received[:rank], below, parts[rank + 1 :], above), (received[rank:], above, parts[:rank], below)]
        if size == 2:  # one of the two is empty on each rank
            other = [num if other != rank else 0 for other in range(size)]
            halves = [(received, other, parts[1 - rank], other)]
        self._works = [
            dist.all_to_all_single(to.view(-1), given.reshape(-1), lengths, own_lengths, group=group, async_op=True)
            for to, lengths, given, own_lengths in halves
        ]
        self._rows = [*received[:rank], parts[rank], *received[rank:]]
        self._spent = [received, whole] if give_back else [received]

    def finish(self) -> None:
        """Wait for the others' parts, and sum."""
        for work in self._works:
            if work is not None:
                self._wait(work)
        first, second, *others = self._rows
        torch.add(first, second, out=self._part)
        for row in others:
            self._part += row
        if self._divisor > 1:
            self._part /= self._divisor
        for tensor in self._spent:
            tensor.untyped_storage().resize_(0)


def exchange_and_sum(
    part: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    average: bool,
    wait: Wait = wait_plainly,
) -> None:
    """Fill `part` with this rank's part of the sum (or mean) of every rank's `whole`, contiguous."""
    Exchange(part, whole, group, dist.get_world_size(group) if average else 1, wait).finish()


def gather_through_gloo(
    module: nn.Module, mesh: DeviceMesh, path: Path | None = None, *, overlap: bool = True, staged: bool = False
) -> Line:
    """Let the units of an FSDP module communicate in this way, where it is gloo; returns a spare group of their ranks.

    Args:
        mesh: of (dp_shard), or of (dp_replicate, dp_shard).
        path: what this rank enters, compared with the others' while it waits for them; None: nobody notes that.
        overlap: whether gradients travel while the next unit computes, which keeps what is received that long.
        staged: whether this rank waits for other stages, too.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if not is_gloo(group, mesh.device_type) or dist.get_world_size(group) == 1:
        return None
    if path is not None and path.wait is wait_plainly:
        watch_path(path, group, staged=staged)
    wait = wait_plainly if path is None else path.wait
    lines = {} if path is None else _open_lines(module, group)
    divisor, at_once = mesh.size(), mesh.ndim > 1 or not overlap
    keep_heap()  # here too, for processes whose group the user's own script has started
    under_way = Reductions()
    for member in module.modules():
        if isinstance(member, FSDPModule):
            state: Any = member._get_fsdp_state()
            line = lines.get(id(state))
            member.set_custom_all_gather(cast("Any", _Gather(wait, line)))
            # The divisions are ours: FSDP2's way with them depends on the type, and may come after this collective.
            member.set_custom_reduce_scatter(cast("Any", _Scatter(wait, line, under_way, state, divisor, at_once)))
            member.set_force_sum_reduction_for_comms(True)
            member.set_gradient_divide_factor(1.0)
    return lines.get(SPARE)


def _open_lines(module: nn.Module, group: dist.ProcessGroup) -> dict[int, dist.ProcessGroup]:
    """Id of a unit's state -> the group that it travels over, one for each size of unit; and a spare one. Collective.

    gloo ends the process where a message is longer than what is expected, as it would be where the ranks enter units of
    unequal size; over groups of their own they wait, and find out (`parting`).
    """
    sizes = dict[int, int]()
    _add_sizes(module, 0, dist.get_world_size(group), sizes)
    distinct = list(dict.fromkeys(sizes.values()))
    spare, *others = _extra_lines(group, max(1, len(distinct)))
    lines = dict(zip(distinct, [group, *others], strict=False))
    return {SPARE: spare, **{unit: lines.get(size, group) for unit, size in sizes.items()}}


def _extra_lines(group: dist.ProcessGroup, wanted: int) -> list[dist.ProcessGroup]:
    """Groups of the same ranks as `group`: as many as any rank of the world wants, those that are there taken again.

    All ranks of the world make all of them, in one order. A group that its members alone make is named after what each
    of them has made before, and where that differs between them they wait for each other forever (torch 2.13).
    """
    own = torch.tensor([min(wanted, MOST_LINES - 1), *dist.get_process_group_ranks(group)])
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    parts = tuple(dict.fromkeys(tuple(ranks) for _, *ranks in map(torch.Tensor.tolist, told)))
    world = dist.group.WORLD
    assert world is not None
    known = _LINES.setdefault(world, {}).setdefault(parts, [])
    for _ in range(len(known), max(int(row[0]) for row in told)):
        made = {part: dist.new_group(list(part), backend="gloo") for part in parts}
        known.append(made[tuple(own[1:].tolist())])
    return known


def _add_sizes(module: nn.Module, unit: int, num_ranks: int, sizes: dict[int, int]) -> None:
    """Add the elements that a rank gives when `module`, a part of `unit`, is gathered; units in it are their own."""
    if isinstance(module, FSDPModule):
        unit = id(module._get_fsdp_state())
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor) and parameter.dim():
            sizes[unit] = sizes.get(unit, 0) - (-parameter.shape[0] // num_ranks) * math.prod(parameter.shape[1:])
    for child in module.children():
        _add_sizes(child, unit, num_ranks, sizes)


class _Works(dist.Work):
    """Several operations under way, as one."""

    def __init__(self, works: Sequence[dist.Work | None], wait: Wait) -> None:
        super().__init__()
        self._works, self._wait = works, wait

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            if work is not None:
                self._wait(work)
        return True


@final
class Reductions:
    """Those of one module: at most one is on its way while its backward goes on, and none once that has ended."""

    def __init__(self) -> None:
        self._exchange: Exchange | None = None

    def begin(self, exchange: Exchange) -> None:
        """Let `exchange` be finished when the next one begins, or by the backward's end at the latest."""
        self.finish()
        self._exchange = exchange
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Finish what is on its way."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.finish()


class _Allocating:
    """What both collectives of a unit have in common."""

    def __init__(self, wait: Wait, line: Line) -> None:
        self._wait, self._line = wait, line

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of its own for every operation."""
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Gather(_Allocating):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """On its way, also where FSDP2 leaves it to a stream to wait: it waits for what this returns."""
        return gather_by_broadcasts(output_tensor, input_tensor, self._line or group, self._wait)


@final
class _Scatter(_Allocating):
    def __init__(self, wait: Wait, line: Line, under_way: Reductions, state: Any, divisor: int, at_once: bool) -> None:
        super().__init__(wait, line)
        self._under_way, self._state, self._divisor, self._at_once = under_way, state, divisor, at_once

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of its own, once the unit before has let go of its own ones."""
        self._under_way.finish()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op
        exchange = Exchange(output_tensor, input_tensor, self._line or group, self._divisor, self._wait, give_back=True)
        if self._is_read_at_once():
            exchange.finish()
        else:
            self._under_way.begin(exchange)

    def _is_read_at_once(self) -> bool:
        """Whether FSDP2 or a hook looks at the sum before the backward has ended: to reduce it further, or to add it.

        What it does besides is to cut it into gradients, which share its memory.
        """
        return self._at_once or any(
            param.sharded_param.grad is not None or getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
            # torch 2.11 has one group a state, later versions a list of them.
            for group in getattr(self._state, "_fsdp_param_groups", None) or [self._state._fsdp_param_group]
            for param in group.fsdp_params
        )
