"""Functions of a forward in which ranks part, and some in which they only seem to."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.models.transformer import Transformer
from tests.rehearsing.tasks import Calling, Layered, Tokens, lopsided


def calling(way: Callable[[torch.Tensor], torch.Tensor]) -> Layered:
    """Calls a function in its middle, in which ranks part."""

    class Parting(Layered):
        def middle(self) -> nn.Module:
            return Calling(way)

    return Parting()


def in_loss(way: Callable[[torch.Tensor], torch.Tensor], **settings: object) -> Tokens:
    """Calls a function in its loss, which under a pipeline the last stage alone computes."""

    class Losing(Tokens):
        def loss(self, output: Any, batch: Any) -> torch.Tensor:
            return super().loss(way(output), batch)

    return Losing(**settings)


def in_blocks(way: Callable[[torch.Tensor], torch.Tensor], **settings: object) -> Tokens:
    """Calls a function after each block, as many times on every stage where these are alike."""

    class Blocked(Tokens):
        def model(self) -> nn.Module:
            model = super().model()
            for block in model.get_submodule("layers").children():
                block.register_forward_hook(lambda block, args, output: way(output))
            return model

    return Blocked(**settings)


class Lopsided(Layered):
    """Rank 0 calls a collective that the others do not."""

    def middle(self) -> nn.Module:
        return Calling(lopsided)


class Tied(Tokens):
    """Its first and its last layer share their weights."""

    def model(self) -> nn.Module:
        sizes: Any = {"ffn": 4 * self.hidden, "max_seq": self.seq}
        return Transformer(self.vocab, self.layers, self.hidden, 4, tied=True, **sizes)


class Summing(torch.optim.SGD):
    """Its update sums something over all ranks, which every stage passes."""

    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.zeros(1))
        return super().step(closure)


class SummingInUpdate(Tokens):
    """Has an optimizer of its own."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return Summing(parameters, lr=0.1)


def over_all(value: torch.Tensor) -> torch.Tensor:
    """Sums over the default group."""
    dist.all_reduce(value.detach().clone())
    return value


def wait_for_all(value: torch.Tensor) -> torch.Tensor:
    """Waits for the default group."""
    dist.barrier()
    return value


def on_odd_ranks(value: torch.Tensor) -> torch.Tensor:
    """Every other rank sums."""
    if dist.get_rank() % 2:
        dist.all_reduce(value.detach().clone())
    return value


def on_second_rank(value: torch.Tensor) -> torch.Tensor:
    """Rank 1 alone sums."""
    if dist.get_rank() == 1:
        dist.all_reduce(value.detach().clone())
    return value


def on_second_pair(value: torch.Tensor) -> torch.Tensor:
    """The second pair of neighbours sums, and neither the first nor the last one."""
    if dist.get_rank() // 2 == 1:
        dist.all_reduce(value.detach().clone())
    return value


def over_first_and_last(value: torch.Tensor) -> torch.Tensor:
    """Sums over a group of the user's own, of which one rank runs the first stage."""
    group = dist.new_group([0, dist.get_world_size() - 1])
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.all_reduce(value.detach().clone(), group=group)
    return value


def by_environment(value: torch.Tensor) -> torch.Tensor:
    """Asks the environment which rank it is."""
    if os.environ["RANK"] == "0":
        dist.all_reduce(value.detach().clone())
    return value


def by_barrier(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 waits for nobody."""
    if dist.get_rank() == 0:
        dist.barrier()
    return value


def by_size(value: torch.Tensor) -> torch.Tensor:
    """The last rank gathers fewer numbers."""
    mine = torch.zeros(8 if dist.get_rank() == 3 else 16)
    dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
    return value


def by_type(value: torch.Tensor) -> torch.Tensor:
    """The last rank sums another type of as many bytes."""
    dist.all_reduce(torch.zeros(16, dtype=torch.float32 if dist.get_rank() == 3 else torch.int32))
    return value


def by_root(value: torch.Tensor) -> torch.Tensor:
    """Every rank sends to the others."""
    dist.broadcast(value.detach().clone(), src=dist.get_rank())
    return value


def by_rows(value: torch.Tensor) -> torch.Tensor:
    """Gathers rows, of which ranks have unequal numbers."""
    dist.all_gather([torch.empty_like(value) for _ in range(dist.get_world_size())], value.detach())
    return value


def in_pairs(value: torch.Tensor) -> torch.Tensor:
    """The first half of the ranks sums in its own group, and rank 0 sends to rank 1."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() < 2:
        dist.all_reduce(value.detach().clone(), group=pairs[0])
    if dist.get_rank() == 0:
        dist.send(value.detach(), 1)
    return value


def apart(value: torch.Tensor) -> torch.Tensor:
    """Of a pair only one sums."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() == 3:
        dist.all_reduce(value.detach().clone(), group=pairs[1])
    return value


def peer(offset: int) -> int:
    """The rank that comes so many behind this one, in a ring."""
    return (dist.get_rank() + offset) % dist.get_world_size()


def around(value: torch.Tensor) -> torch.Tensor:
    """Sends to the next rank and receives from the one before, at once."""
    ops = [
        dist.P2POp(dist.isend, value.detach().clone(), peer(1)),
        dist.P2POp(dist.irecv, torch.empty_like(value), peer(-1)),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return value


def functionally(value: torch.Tensor) -> torch.Tensor:
    """The same by functional calls, and a send that rank 1 alone receives."""
    calls = torch.ops._c10d_functional
    name = dist.distributed_c10d._get_default_group().group_name
    sent, taken = value.detach().clone(), torch.empty_like(value)
    for one in calls.batch_p2p_ops(["isend", "irecv"], [peer(1), peer(-1)], [0, 0], [sent, taken], name):
        calls.wait_tensor(one)
    if dist.get_rank() == 0:
        calls.wait_tensor(calls.isend(value.detach().clone(), 1, 0, name))
    if dist.get_rank() == 1:
        calls.wait_tensor(calls.irecv(torch.empty_like(value), 0, 0, name))
    return value


def to_nobody(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends, and rank 1 does not receive."""
    if dist.get_rank() == 0:
        dist.send(value.detach().clone(), 1, tag=3)
    return value


def from_nobody(value: torch.Tensor) -> torch.Tensor:
    """Rank 1 receives what rank 0 sends functionally with another tag."""
    name = dist.distributed_c10d._get_default_group().group_name
    if dist.get_rank() == 0:
        torch.ops._c10d_functional.batch_p2p_ops(["isend"], [1], [2], [value.detach().clone()], name)
    else:
        dist.recv(torch.empty_like(value), 0)
    return value


def too_small(value: torch.Tensor) -> torch.Tensor:
    """Rank 1 receives one row of four."""
    if dist.get_rank() == 0:
        dist.send(value.detach().clone(), 1)
    else:
        dist.recv(torch.empty_like(value)[:1], 0)
    return value


def other_type(value: torch.Tensor) -> torch.Tensor:
    """Rank 1 receives whole numbers."""
    if dist.get_rank() == 0:
        dist.isend(value.detach().clone(), 1).wait()  # type: ignore[union-attr]
    else:
        dist.recv(torch.empty_like(value, dtype=torch.int32), 0)
    return value


def send_first(value: torch.Tensor) -> torch.Tensor:
    """Both send before they receive."""
    dist.send(value.detach().clone(), peer(1))
    dist.recv(torch.empty_like(value), peer(-1))
    return value


def sum_first(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 sums with all before it sends, rank 1 receives before it sums."""
    if dist.get_rank() == 0:
        dist.all_reduce(value.detach().clone())
        dist.send(value.detach().clone(), 1)
        return value
    dist.recv(torch.empty_like(value), 0)
    dist.all_reduce(value.detach().clone())
    return value


def two_on(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends to rank 2, which receives one of the two messages."""
    if dist.get_rank() == 0:
        dist.send(value.detach().clone(), 2)
        dist.send(value.detach().clone(), 2)
    if dist.get_rank() == 2:
        dist.recv(torch.empty_like(value), 0)
    return value


def from_any(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 takes from whoever sends."""
    if dist.get_rank() == 0:
        dist.irecv(torch.empty_like(value)).wait()  # type: ignore[union-attr]
    else:
        dist.send(value.detach().clone(), 0)
    return value


def reads_what_comes(value: torch.Tensor) -> torch.Tensor:
    """Objects from rank 0 to rank 2, whose size is read."""
    if dist.get_rank() == 0:
        dist.send_object_list(["a"], 2)
    if dist.get_rank() == 2:
        dist.recv_object_list([None], 0)
    return value
