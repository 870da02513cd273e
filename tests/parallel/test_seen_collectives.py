"""What a rank receives in each collective."""

from typing import Any

import torch

from allranks.parallel.seen_collectives import moved_bytes, received_bytes


class Group:
    """The second of four ranks."""

    group_name = "some"

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 1


def test_the_bytes_of_each_collective() -> None:
    one, four = torch.zeros(3), torch.zeros(12)
    group: Any = Group()
    assert received_bytes("allreduce_", group, ([four], None)) == 72
    assert [received_bytes("broadcast_", group, ([one], None, root)) for root in (0, 1)] == [12, 0]
    assert received_bytes("_allgather_base_", group, (four, one, None)) == 36
    assert received_bytes("allgather_", group, ([[one] * 4], [one], None)) == 36
    assert received_bytes("_reduce_scatter_base_", group, (one, four, None)) == 36
    assert received_bytes("alltoall_base_", group, (four, four, None, [], [])) == 36
    assert received_bytes("alltoall_base_", group, (four, four, None, [1, 6, 2, 3], [])) == 24
    assert (received_bytes("send", group, ([one],)), received_bytes("recv_", group, ([one],))) == (0, 12)
    assert (moved_bytes("send", group, ([one],)), moved_bytes("recv_", group, ([one],))) == (12, 12)
