"""Routers that count: found by structure, added up over the ranks, moved once a step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.models.moe import MoETransformer
from allranks.parallel.balance import Balances, find_balances
from tests.distributed.pool import Pools


class Counting(nn.Module):
    """A user's own router."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.zeros(number, dtype=torch.int64))
        self.updates: list[list[int]] = []

    def update_balance(self) -> None:
        self.updates.append(self.get_buffer("tokens_per_expert").tolist())


def test_they_are_found_by_what_they_have() -> None:
    shared = Counting()
    other = nn.Linear(2, 2)
    other.register_buffer("tokens_per_expert", torch.zeros(3))  # without a way to move
    module = nn.Sequential(shared, nn.Sequential(shared, other), Counting())
    found = find_balances({"a": module}, None)
    assert found.names == {"a.0.tokens_per_expert", "a.1.0.tokens_per_expert", "a.2.tokens_per_expert"}
    found.finish_step()
    assert len(shared.updates) == 1, "each once"
    # The transformer itself has the method too, and no counts.
    model = MoETransformer(7, 2, 8, 2, num_experts=3, top_k=1, max_seq=4)
    assert find_balances({"": model}, None).names == {
        f"layers.{layer}.feed_forward.router.tokens_per_expert" for layer in range(2)
    }
    assert find_balances({"": nn.Linear(2, 2)}, None).names == Balances().names == frozenset()


def finish() -> list[list[int]]:
    rank = dist.get_rank()
    routers = [Counting(3), Counting(2)]
    routers[0].get_buffer("tokens_per_expert").copy_(torch.tensor([1, 2, 3]) * (rank + 1))
    routers[1].get_buffer("tokens_per_expert").copy_(torch.tensor([rank, 5]))
    find_balances({"": nn.ModuleList(routers)}, dist.group.WORLD).finish_step()
    return [counts for router in routers for counts in router.updates]


@pytest.mark.distributed
def test_they_move_by_what_all_ranks_have_counted(pool: Pools) -> None:
    assert pool(3).run(finish) == [[[6, 12, 18], [3, 15]]] * 3


def test_what_another_stage_holds_is_left_to_it() -> None:
    here, elsewhere = Counting(), Counting().to("meta")
    find_balances({"": nn.ModuleList([elsewhere, here])}, None).finish_step()
    assert (len(here.updates), len(elsewhere.updates)) == (1, 0)


def test_without_routers_nothing_is_sent() -> None:
    Balances(group=dist.group.WORLD).finish_step()  # there is no process group here


def test_what_a_step_that_is_not_made_has_counted_is_forgotten() -> None:
    here, elsewhere = Counting(), Counting().to("meta")
    here.get_buffer("tokens_per_expert").fill_(5)
    find_balances({"": nn.ModuleList([elsewhere, here])}, None).forget()
    assert here.get_buffer("tokens_per_expert").tolist() == [0, 0, 0] and here.updates == []
