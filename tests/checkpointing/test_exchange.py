"""Bytes between ranks."""

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing.exchange import broadcast_bytes, gather_bytes
from allranks.errors import ProcessError
from tests.distributed.pool import Pools

CPU = torch.device("cpu")


def test_one_process_keeps_its_own() -> None:
    assert gather_bytes(b"abc", None, CPU) == [b"abc"]
    assert broadcast_bytes(b"abc", None, CPU) == b"abc"


@pytest.mark.distributed
@pytest.mark.parametrize("lengths", [(3, 0, 100_000), (0, 0, 0), (1, 2, 3)])
def test_bytes_of_any_length_arrive_at_the_first_rank(pool: Pools, lengths: tuple[int, ...]) -> None:
    def case() -> list[bytes]:
        rank = dist.get_rank()
        return gather_bytes(bytes([rank + 1]) * lengths[rank], dist.group.WORLD, CPU)

    assert pool(3).run(case) == [[bytes([rank + 1]) * length for rank, length in enumerate(lengths)], [], []]


@pytest.mark.distributed
@pytest.mark.parametrize("data", [b"", b"\x00\xff", b"x" * 100_000])
def test_the_first_ranks_bytes_arrive_everywhere(pool: Pools, data: bytes) -> None:
    def case() -> bool:
        mine = data if dist.get_rank() == 0 else b"not mine"
        return broadcast_bytes(mine, dist.group.WORLD, CPU) == data

    assert pool(3).run(case) == [True] * 3


@pytest.mark.distributed
def test_ranks_are_counted_within_the_group(pool: Pools) -> None:
    def case() -> tuple[list[bytes], bytes]:
        rank = dist.get_rank()
        group = dist.new_group([1, 2])
        found: tuple[list[bytes], bytes] = ([], b"")
        if rank > 0:
            name = str(rank).encode()
            found = gather_bytes(name, group, CPU), broadcast_bytes(name, group, CPU)
        dist.destroy_process_group(group)
        return found

    assert pool(3).run(case) == [([], b""), ([b"1", b"2"], b"1"), ([], b"1")]


@pytest.mark.distributed
@pytest.mark.parametrize("call", ["gather", "broadcast"])
def test_a_lost_peer_is_a_transient_error_of_one_line(pool: Pools, call: str) -> None:
    def case() -> str:
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            dist.destroy_process_group()  # closes its connections, as its death would
            return ""
        exchange = gather_bytes if call == "gather" else broadcast_bytes
        try:
            for _ in range(1000):  # a broadcast may still leave before the end is seen
                exchange(b"abc", dist.group.WORLD, CPU)
        except ProcessError as error:
            return str(error)
        return "nothing was lost"

    lost = pool(2).run_alone(case)[0]
    what = "a checkpoint's parts were collected" if call == "gather" else "a checkpoint was committed"
    assert lost.startswith(f"a peer was lost while {what}: ") and "\n" not in lost
