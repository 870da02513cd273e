"""The moves of expert parallelism: rows that travel to the ranks of their experts and back, and their order there.

Rows go by one all-to-all of uneven parts; its backward is the same one the other way, so that it can be differentiated
again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from allranks.parallel.tensor_ops import as_output

Group = dist.ProcessGroup


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: Group, sent: list[int], received: list[int], *reaches: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        ctx.places = [(one.shape, one.device) for one in reaches]
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return as_output(found)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = exchange(gradient, ctx.group, ctx.received, ctx.sent)
        # Without a gradient, too, what has made `reaches` runs its backward. A compiler leaves out what nothing needs,
        # though, and nothing may need the gradients of no rows: their sum is zero.
        others = [None if len(back) else back.sum().expand(shape).to(device) for shape, device in ctx.places]
        return back, None, None, None, *others


def exchange(
    rows: torch.Tensor,
    group: Group,
    sent: Sequence[int],
    received: Sequence[int],
    reaches: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Send the first `sent[0]` rows to the group's first rank, and so on; collective.

    Args:
        rows: [sum(sent), ...].
        received: how many rows come from each rank.
        reaches: what a backward from here goes on to, though `rows` may not depend on it; that gives it no gradient.

    Returns:
        [sum(received), ...], those of the first rank first. It has a backward where `rows` or one of `reaches` has.
    """
    found: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        rows, group, list(sent), list(received), *reaches
    )
    return found


def exchange_counts(counts: torch.Tensor, group: Group) -> torch.Tensor:
    """How many rows each rank has for each of this rank's experts; collective.

    Args:
        counts: [num_experts], how many rows this rank has for each; every rank of the group has equally many experts,
            the first rank the first ones.

    Returns:
        [ranks, experts of one rank], of the type of `counts`.
    """
    found = torch.empty_like(counts)
    dist.all_to_all_single(found, counts.contiguous(), group=group)
    return found.view(dist.get_world_size(group), -1)


def order_by_expert(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The order that puts rows which lie by rank and then by expert by expert first, and then by rank.

    Args:
        counts: [ranks, experts], as `exchange_counts` gives them.
        num_rows: their sum, on the host.

    Returns:
        [num_rows], indices into the rows as they lie.
    """
    ranks, experts = counts.shape
    expert_of_part = torch.arange(experts, device=counts.device).repeat(ranks)
    expert_of_row = expert_of_part.repeat_interleave(counts.flatten(), output_size=num_rows)
    return expert_of_row.argsort(stable=True)
