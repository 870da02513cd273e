"""A functional collective is told as the call in place that moves the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from allranks.parallel.functional_calls import stands_for
from allranks.parallel.seen_collectives import Collectives, collective_name, received_bytes
from allranks.parallel.tensor_ops import all_gather_single, reduce_scatter_single
from allranks.rehearsing.terms import even_bytes, terms_of
from allranks.rehearsing.world import fake_world

NUMBERS = torch.zeros(4)
Told = tuple[str, int, int, str, int | None]


def note_all(call: Callable[[], Any]) -> list[Told]:
    """What is told of a call on rank 0 of two: name, bytes, size of the group, terms, bytes that are even."""
    seen: list[Told] = []

    def note(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        terms = terms_of(name, args), even_bytes(name, args)
        seen.append((collective_name(name), received_bytes(name, group, args), group.size(), *terms))

    with fake_world(0, 2, "gloo"), Collectives(note):
        call()
    return seen


def functional(name: str, *args: Any) -> Any:
    """An operator of torch's, over all ranks; its functions have had several names."""
    group = dist.distributed_c10d._get_default_group()
    return torch.ops._c10d_functional.wait_tensor(getattr(torch.ops._c10d_functional, name)(*args, group.group_name))


PAIRS: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: functional("all_reduce", NUMBERS, "sum"), lambda: dist.all_reduce(NUMBERS.clone())),
    (lambda: functional("all_reduce_", NUMBERS.clone(), "sum"), lambda: dist.all_reduce(NUMBERS.clone())),
    (lambda: functional("broadcast", NUMBERS, 1), lambda: dist.broadcast(NUMBERS.clone(), src=1)),
    (lambda: functional("all_gather_into_tensor", NUMBERS, 2), lambda: all_gather_single(torch.zeros(8), NUMBERS)),
    (
        lambda: functional("reduce_scatter_tensor", NUMBERS, "sum", 2),
        lambda: reduce_scatter_single(torch.zeros(2), NUMBERS.clone()),
    ),
    (
        lambda: functional("all_to_all_single", NUMBERS, [2, 2], [2, 2]),
        lambda: dist.all_to_all_single(NUMBERS.clone(), NUMBERS),
    ),
    (
        lambda: functional("all_to_all_single", NUMBERS, [1, 3], [2, 2]),
        lambda: dist.all_to_all_single(NUMBERS.clone(), NUMBERS, [1, 3], [2, 2]),
    ),
    (lambda: functional("isend", NUMBERS, 1, 3), lambda: dist.send(NUMBERS, 1, tag=3)),
    (lambda: functional("irecv", NUMBERS, 1, 3), lambda: dist.recv(NUMBERS, 1, tag=3)),
]


@pytest.mark.parametrize(("call", "in_place"), PAIRS)
def test_it_is_told_as_the_call_in_place(call: Callable[[], Any], in_place: Callable[[], Any]) -> None:
    told = note_all(call)
    assert len(told) == 1 and told == note_all(in_place)


def test_what_a_dtensor_does_is_told() -> None:
    def spread() -> None:
        mesh = init_device_mesh("cpu", (2,))
        DTensor.from_local(NUMBERS, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()

    assert [(name, moved) for name, moved, *_ in note_all(spread)][-1:] == [("all-gather", 16)]


def test_several_tensors_are_one_call() -> None:
    group = dist.distributed_c10d._get_default_group

    def together() -> None:
        for one in torch.ops._c10d_functional.all_reduce_coalesced([NUMBERS, NUMBERS], "sum", group().group_name):
            torch.ops._c10d_functional.wait_tensor(one)

    assert note_all(together) == [("all-reduce", 32, 2, "float32", 32)]


def test_sends_and_receives_at_once_are_as_many_calls_with_their_peers_and_tags() -> None:
    seen: list[tuple[str, int, int, int]] = []

    def together() -> None:
        pair, world = dist.new_group([1, 2]), dist.distributed_c10d._get_default_group()
        for group in (world, pair):
            given = ["isend", "irecv"], [2, 2], [3, 4], [NUMBERS, NUMBERS.clone()], group.group_name
            torch.ops._c10d_functional.batch_p2p_ops(*given)
            dist.send(NUMBERS, 2, group=group, tag=5)

    def note(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        seen.append((name, group.size(), args[2], args[3]))

    with fake_world(1, 3, "gloo"), Collectives(note):
        together()
    of_world = [("send", 3, 2, 3), ("recv_", 3, 2, 4), ("send", 3, 2, 5)]
    assert seen == [*of_world, *((name, 2, 1, tag) for name, _, _, tag in of_world)], "in a pair it is member 1"


def test_a_wait_is_no_collective() -> None:
    assert stands_for("_c10d_functional::wait_tensor", (NUMBERS,), NUMBERS) == []
