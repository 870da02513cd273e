"""Routers that balance their experts by counting: once a step, over what all ranks have counted.

A router counts in its training forwards how many tokens each expert got, in a buffer `tokens_per_expert`, and its
`update_balance()` moves a bias by these counts and begins anew. Between the two the ranks' counts are added up, so that
the bias depends on the global batch alone, however it was cut (law 4), and is the same on every rank. Fillers and
evaluation count nothing: buffers go back to their values there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from allranks.parallel.average import alike

COUNTS = "tokens_per_expert"


@final
class Balances:
    """The counting routers of a spread model.

    Args:
        routers: each once.
        names: the logical names of their counts.
        group: the ranks that see other samples; None for one.

    Attributes:
        names: as given. Between two steps these buffers follow the samples of this rank alone.
    """

    def __init__(
        self, routers: Sequence[Any] = (), names: Sequence[str] = (), group: dist.ProcessGroup | None = None
    ) -> None:
        self.names = frozenset(names)
        self._routers = list(routers)
        self._group = group

    def finish_step(self) -> None:
        """After a step's last update: add up the counts of all ranks, and let every router move; collective."""
        if self._routers:
            self._move()

    @torch.no_grad()
    def forget(self) -> None:
        """Begin anew without a move: what was counted belongs to a step that is not made."""
        for router in self._routers:
            router.get_buffer(COUNTS).zero_()

    @torch.no_grad()
    def _move(self) -> None:
        # Other stages of a pipeline have what has no memory here, and so have all that reduce with this rank.
        routers = [router for router in self._routers if not router.get_buffer(COUNTS).is_meta]
        if routers and self._group is not None:
            counts = [router.get_buffer(COUNTS) for router in routers]
            for places in alike(counts):
                some = [counts[place] for place in places]
                world = torch.cat([count.reshape(-1) for count in some])
                dist.all_reduce(world, group=self._group)
                for count, everyones in zip(some, world.split([count.numel() for count in some]), strict=True):
                    count.copy_(everyones.view(count.shape))
        for router in routers:
            router.update_balance()


def find_routers(module: nn.Module) -> list[nn.Module]:
    """Every part that has the buffer `tokens_per_expert` and a method `update_balance`, each once."""
    return [part for part in module.modules() if _balances(part)]


def find_balances(modules: Mapping[str, nn.Module], group: dist.ProcessGroup | None) -> Balances:
    """Every module that has the buffer `tokens_per_expert` and a method `update_balance`."""
    found = [
        (f"{name}.{COUNTS}" if name else COUNTS, member)
        for which, module in modules.items()
        for name, member in module.named_modules(prefix=which, remove_duplicate=False)
        if _balances(member)
    ]
    return Balances(list({id(member): member for _, member in found}.values()), [name for name, _ in found], group)


def _balances(part: nn.Module) -> bool:
    return part._buffers.get(COUNTS) is not None and callable(getattr(part, "update_balance", None))
