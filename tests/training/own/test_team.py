"""A team of ranks: who is in it, what its members do together, and what it says to everybody else."""

import torch

import allranks
from tests.distributed.pool import Pools
from tests.training.own.cases import refusal


def test_members_use_it_and_others_are_told(pool: Pools) -> None:
    def case() -> tuple[object, ...]:
        import torch.distributed as dist

        with allranks.join() as world:
            team, other = world.team([2, 0]), world.team([1])
            if not team.member:
                refused = [refusal(lambda: team.rank), refusal(lambda: team.group), refusal(team.barrier)]
                return team.ranks, team.size, {*refused, refusal(lambda: team.gather(torch.ones(1)))}, other.rank
            total = torch.full((), float(world.rank + 1))
            dist.all_reduce(total, group=team.group)
            team.barrier()
            rows = team.gather(torch.full((world.rank + 1,), world.rank))
            return repr(team), team.rank, total.item(), rows.tolist()

    first, second, third = pool(3).run(case)
    told = "LayoutError: rank 1 is not in team [0, 2]: ask `team.member` before using it"
    assert first == ("<Team of ranks [0, 2]>", 0, 4.0, [0, 2, 2, 2])
    assert third == ("<Team of ranks [0, 2]>", 1, 4.0, [0, 2, 2, 2])
    assert second == ((0, 2), 2, {told}, 0)


def test_two_teams_reduce_independently(pool: Pools) -> None:
    """One half reduces three times while the other does once."""

    def case() -> tuple[bool, float]:
        import torch.distributed as dist

        with allranks.join() as world:
            teams = [world.team(range(4)), world.team(range(4, 8))]
            mine = teams[world.rank // 4]
            total = torch.full((), float(world.rank))
            for _ in range(3 if world.rank < 4 else 1):
                dist.all_reduce(total, group=mine.group)
            return teams[1 - world.rank // 4].member, total.item()

    found = pool(8).run(case, timeout=120)
    assert found == [(False, (0 + 1 + 2 + 3) * 4.0**2)] * 4 + [(False, 4.0 + 5 + 6 + 7)] * 4


def test_what_is_no_team_is_refused_on_every_rank(pool: Pools) -> None:
    def case() -> list[str]:
        with allranks.join() as world:
            wrong = [[0, 2], [], [1, 1], [-1]]
            asked = [refusal(lambda ranks=ranks: world.team(ranks)) for ranks in wrong]  # type: ignore[misc]
            return [*asked, refusal(lambda: world.team([world.rank]))]

    for rank, found in enumerate(pool(2).run(case)):
        assert found == [
            "LayoutError: team([0, 2]): the world's ranks are 0 to 1",
            "LayoutError: team([]): name at least one rank, each once",
            "LayoutError: team([1, 1]): name at least one rank, each once",
            "LayoutError: team([-1]): the world's ranks are 0 to 1",
            f"LayoutError: team([{rank}]) on rank {rank}: rank 0 called team([0]); all name the same",
        ]


def test_alone() -> None:
    with allranks.join() as world:
        team = world.team([0])
        assert (team.ranks, team.member, team.rank, team.group) == ((0,), True, 0, None)
        team.barrier()
        assert team.gather(torch.ones(2)).tolist() == [1.0, 1.0]
        assert refusal(lambda: world.team([1])) == "LayoutError: team([1]): the world's ranks are 0 to 0"
