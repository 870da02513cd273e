"""The copy that an asynchronous checkpoint is written from: no later step changes it, and its memory is used again."""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from allranks.checkpointing.portion import digests_of, portion_of
from allranks.checkpointing.stage import Stage, _waiting
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import Pairs, parts, same_bits, whole_tensors


def portion(pairs: Pairs) -> Any:
    return portion_of(pairs, 0, {}, {}, tells=True)


def test_what_a_later_step_does_is_not_in_the_copy() -> None:
    live = parts(whole_tensors(), 0, 1)
    copied, ready = Stage().copy(portion(live))
    for _, tensor in live:
        tensor.zero_()
    ready()
    expected = whole_tensors()
    assert len(copied.mine) == len(expected)
    assert all(same_bits(tensor, expected[entry.name]) for entry, tensor in copied.mine)


def test_the_memory_is_used_again_and_follows_what_changes_its_shape() -> None:
    stage = Stage()
    first, _ = stage.copy(portion(parts({"model.a": torch.ones(4), "model.b": torch.ones(2)}, 0, 1)))
    second, _ = stage.copy(portion(parts({"model.a": torch.zeros(4), "model.b": torch.ones(3)}, 0, 1)))
    (a, b), (again, other) = [[tensor for _, tensor in some.mine] for some in (first, second)]
    assert a.data_ptr() == again.data_ptr() and again.sum() == 0
    assert b.data_ptr() == other.data_ptr() and other.tolist() == [1, 1, 1]
    third, _ = stage.copy(portion(parts({"model.a": torch.zeros(4), "model.b": torch.ones(300)}, 0, 1)))
    assert [tensor.sum().item() for _, tensor in third.mine] == [0, 300]


def test_it_is_one_piece_as_large_as_what_is_written() -> None:
    """Torch rounds pinned memory to powers of two: three tensors of 33 KiB would take 192."""
    tensors = {f"model.{name}": torch.full((33 * 1024,), value, dtype=torch.uint8) for value, name in enumerate("abc")}
    tensors |= {"model.flag": torch.tensor(True), "model.none": torch.zeros(0, 3), "model.wide": torch.ones(3).double()}
    stage = Stage()
    copied, _ = stage.copy(portion(parts(tensors, 0, 1)))
    assert len(copied.mine) == 6
    assert {tensor.untyped_storage().data_ptr() for _, tensor in copied.mine} == {stage._buffer.data_ptr()}
    assert stage._buffer.numel() == 3 * 33 * 1024 + 64 + 64
    for entry, tensor in copied.mine:
        assert same_bits(tensor, tensors[entry.name]) and tensor.storage_offset() * tensor.element_size() % 64 == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has GPUs of CUDA and keeps memory from forks")
@pytest.mark.parametrize("pins", [True, False])
def test_pinned_memory_is_let_go_of_before_it_goes(monkeypatch: pytest.MonkeyPatch, pins: bool) -> None:
    calls = list[tuple[Any, ...]]()

    def register(*given: int) -> int:
        calls.append(("register", *given))
        return int(not pins)

    unregister: Any = lambda pointer: calls.append(("unregister", pointer))  # noqa: E731
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", lambda *_, **named: calls.append(("asked", named["device"])))
    stage = Stage()
    first = stage._allocate(100, pinned=True).data_ptr()
    assert first % mmap.PAGESIZE == 0
    assert calls == [("register", first, 100, 1)] + ([] if pins else [("asked", "cuda")])
    calls.clear()
    stage._unpin()
    second = stage._allocate(200, pinned=True)
    second.fill_(7)
    del stage
    assert [call for call in calls if call[0] == "unregister"] == (
        [("unregister", first), ("unregister", second.data_ptr())] if pins else []
    )
    assert second.sum() == 1400


def test_what_is_not_contiguous_is_copied_by_value() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    live = parts({"model.a": torch.zeros(4, 3)}, 0, 1)
    copied, _ = Stage().copy(portion([(live[0][0], whole.T)]))
    assert torch.equal(copied.mine[0][1], whole.T) and copied.mine[0][1].is_contiguous()


def test_a_proof_knows_the_digests_of_the_live_tensors() -> None:
    live = portion(parts(whole_tensors(), 0, 1))
    proven, _ = Stage().copy(live, proves=True)
    assert proven.digests == digests_of(live.mine)
    assert Stage().copy(live)[0].digests is None


def test_no_memory_is_one_line_with_the_way_out() -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate\nmore")
    with (
        mock.patch.object(Stage, "_allocate", side_effect=error),
        pytest.raises(
            CheckpointError, match=r"a copy of 16 B .*can't allocate .*checkpoint.asynchronous=false"
        ) as told,
    ):
        Stage().copy(portion(parts({"model.a": torch.ones(4)}, 0, 1)))
    assert "\n" not in str(told.value)


def test_a_copy_is_waited_for_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits has device 0 as its current one, and would begin to use it."""
    current, waited = [0], list[tuple[int, int]]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    def stream(device: torch.device) -> Any:
        event = SimpleNamespace(synchronize=lambda: waited.append((device.index, current[-1])))
        return SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    copied = [(None, SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))) for index in (1, 2, 1)]
    live: Any = SimpleNamespace(mine=copied)
    _waiting(live)()
    assert sorted(waited) == [(1, 1), (2, 2)] and current == [0]


@pytest.mark.gpu
def test_a_device_is_copied_in_the_order_of_its_stream() -> None:
    tensor = torch.ones(1 << 24, device="cuda")
    live = parts({"model.a": torch.zeros(1 << 24)}, 0, 1)
    stage = Stage()  # its memory is pinned for as long as it lives
    copied, ready = stage.copy(portion([(live[0][0], tensor)]))
    for _ in range(50):
        tensor.mul_(2.0)
    ready()
    copy = copied.mine[0][1]
    assert copy.is_pinned() and torch.equal(copy, torch.ones(1 << 24))
