"""A few ranks among all: a process group that says so when a rank uses it that is not in it."""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from allranks.errors import LayoutError
from allranks.parallel.gather import gather_rows
from allranks.parallel.waiting import wait_of_world
from allranks.stepping.world import Processes


@final
class Team:
    """Some ranks of the world, made by `world.team`.

    Attributes:
        ranks: global ranks, ascending.
        size: how many.
        member: whether this process is one of them; only members may use the rest.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.member = rank in ranks
        self._rank = rank
        self._group = group

    def __repr__(self) -> str:
        return f"<Team of ranks {list(self.ranks)}>"

    @property
    def rank(self) -> int:
        """This process's place in the team, from 0."""
        self._check_member()
        return self.ranks.index(self._rank)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, for torch.distributed; None in a world of one process, where there is none."""
        self._check_member()
        return self._group

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The members' rows, in the team's order, with gradients; each may bring another number; collective."""
        self._check_member()
        return gather_rows(rows, self._group)

    def barrier(self) -> None:
        """Wait for every member."""
        self._check_member()
        if self._group is not None:
            dist.barrier(group=self._group)

    def _check_member(self) -> None:
        if not self.member:
            raise LayoutError(f"rank {self._rank} is not in team {list(self.ranks)}: ask `team.member` before using it")


def make_team(ranks: Sequence[int], processes: Processes) -> Team:
    """The Team of `ranks`; called by every rank of the world, members or not, in the same order; collective.

    Raises:
        LayoutError: on every rank, where one is not in the world, stands twice, or the callers named different ones.
    """
    named = sorted(int(rank) for rank in ranks)
    chosen: list[int] = processes.share(named)
    if _any_differs(named != chosen, processes):
        raise LayoutError(f"team({named}) on rank {processes.rank}: rank 0 called team({chosen}); all name the same")
    outside = [rank for rank in chosen if not 0 <= rank < processes.size]
    if not chosen or outside or len(set(chosen)) < len(chosen):
        wrong = f"the world's ranks are 0 to {processes.size - 1}" if outside else "name at least one rank, each once"
        raise LayoutError(f"team({chosen}): {wrong}")
    if processes.size == 1:
        return Team(tuple(chosen), processes.rank, None)
    made = dist.new_group(chosen, timeout=wait_of_world())
    return Team(tuple(chosen), processes.rank, made if processes.rank in chosen else None)


def _any_differs(differs: bool, processes: Processes) -> bool:
    if processes.size == 1:
        return differs
    flag = torch.tensor([int(differs)], dtype=torch.int64, device=processes.device)
    dist.all_reduce(flag)
    return bool(flag.item())
