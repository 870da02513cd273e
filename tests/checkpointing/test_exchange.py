"""Bytes between ranks."""

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing.exchange import among_peers, broadcast_bytes, gather_bytes
from allranks.errors import ProcessError
from allranks.failure import is_out_of_memory
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
def test_where_gloo_serves_the_host_too_nothing_goes_to_the_device(pool: Pools) -> None:
    def case() -> tuple[list[bytes], bytes]:
        group = dist.new_group(backend="gloo")  # for tensors of either place, as "cuda:nccl,cpu:gloo"
        device, name = torch.device("cuda", 0), str(dist.get_rank()).encode()  # which this machine need not have
        found = gather_bytes(name, group, device), broadcast_bytes(name, group, device)
        dist.destroy_process_group(group)
        return found

    assert pool(2).run(case) == [([b"0", b"1"], b"0"), ([], b"0")]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error: Cuda failure 2 'out of memory'"),
        dist.DistBackendError("NCCL error: ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 700"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("shape '[2]' is invalid for input of size 3"),
    ],
)
def test_what_is_no_loss_of_a_peer_stays_what_it_is(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as caught, among_peers("a checkpoint was committed"):
        raise error
    assert caught.value is error and is_out_of_memory(error) == ("out of memory" in str(error))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5123"),
        RuntimeError("[/gloo/transport/tcp/pair.cc:446] Read error [10.0.0.2]:5123: No route to host"),
        dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"),
        dist.DistNetworkError("The client socket has failed to connect"),
    ],
)
def test_what_the_backend_says_of_a_peer_is_the_loss_of_one(error: RuntimeError) -> None:
    with (
        pytest.raises(ProcessError, match=r"^a peer was lost while bytes went around: "),
        among_peers("bytes went around"),
    ):
        raise error


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
