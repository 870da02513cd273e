"""Gathering and reduce-scattering over gloo by other operations than its own, which are slow.

Of 7 MB over loopback gloo's reduce_scatter takes longer than its all_reduce; an exchange of parts and a sum takes a
third to two thirds of that, and a broadcast of each part less than gloo's all_gather. bench/gloo.py measures it,
docs/explanation/measured.md has the figures. The parts are summed in the order of the ranks.

Nor does a unit wait for them: FSDP2 overlaps on streams, which a CPU has not. What a unit's backward needs next is on
its way while the unit before computes, and its own gradients travel while the next one computes.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from allranks.parallel.heap import keep_heap
from allranks.parallel.lines import SPARE, open_lines
from allranks.parallel.parting import watch_path
from allranks.parallel.path import Path, wait_plainly

Wait = Callable[[dist.Work], object]
Line = dist.ProcessGroup | None

NO_TIMEOUT = timedelta()


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
    module: nn.Module,
    mesh: DeviceMesh,
    path: Path | None = None,
    *,
    overlap: bool = True,
    staged: bool = False,
    apart: Collection[nn.Module] = (),
    divisor: int | None = None,
    under_way: "Reductions | None" = None,
) -> Line:
    """Let the units of an FSDP module communicate in this way, where it is gloo; returns a spare group of `mesh`.

    Args:
        mesh: of (dp_shard), or of (dp_replicate, dp_shard).
        path: what this rank enters, compared with the others' while it waits for them; None: nobody notes that.
        overlap: whether gradients travel while the next unit computes, which keeps what is received that long.
        staged: whether this rank waits for other stages, too.
        apart: units in `module` that another mesh shards.
        divisor: of the sum of gradients; by default the number of ranks, as is FSDP2's own.
        under_way: by default reductions of these units alone.
    """
    members = [one for one in module.modules() if isinstance(one, FSDPModule) and one not in apart]
    if divisor is not None:
        for member in members:
            member.set_gradient_divide_factor(float(divisor))
    group = mesh.get_group(mesh.ndim - 1)
    if not is_gloo(group, mesh.device_type) or mesh.size() == 1:
        if dist.get_backend(group) == dist.Backend.GLOO:
            # A GPU's tensors: torch's own gloo may sum where a mean is asked for (pytorch issue 162338).
            for member in members:
                member.set_force_sum_reduction_for_comms(True)
        return None
    lines = {} if path is None else open_lines(module, mesh, apart)
    if path is not None and path.wait is wait_plainly:
        watch_path(path, lines.get(SPARE, group), staged=staged)
    wait = wait_plainly if path is None else path.wait
    if dist.get_world_size(group) == 1:
        return lines.get(SPARE)
    divisor, at_once = divisor or mesh.size(), mesh.ndim > 1 or not overlap
    keep_heap()  # here too, for processes whose group the user's own script has started
    under_way = Reductions() if under_way is None else under_way
    for member in members:
        state: Any = member._get_fsdp_state()
        line = lines.get(id(state))
        member.set_custom_all_gather(cast("Any", _Gather(wait, line)))
        # The divisions are ours: FSDP2's way with them depends on the type, and may come after this collective.
        member.set_custom_reduce_scatter(cast("Any", _Scatter(wait, line, under_way, state, divisor, at_once)))
        member.set_force_sum_reduction_for_comms(True)
        member.set_gradient_divide_factor(1.0)
    return lines.get(SPARE)


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
