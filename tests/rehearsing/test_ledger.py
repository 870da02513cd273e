"""Storages are counted once, however many tensors view them, and as long as they live."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from allranks.rehearsing.ledger import Ledger, Stored


def changes(ledger: Ledger) -> list[int]:
    return [num_bytes for stretch in ledger.stretches for _, num_bytes in stretch.changes]


def test_a_storage_lives_from_its_first_tensor_to_its_last() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        resting = torch.empty(3)
        ledger.find(resting)
        ledger.begin("forward")
        first = torch.empty(10)
        assert ledger.find(first) is ledger.find(first[2:4])
        view = first[1:]
        del first
        assert changes(ledger) == [40]
        ledger.begin("backward")
        del view
    assert changes(ledger) == [40, -40]
    assert [stored.num_bytes for stored, _ in ledger.resting] == [12]
    assert [len(stretch.changes) for stretch in ledger.stretches] == [1, 1]


def test_resizing_in_place_is_seen() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger.watching_sizes():
        ledger.begin("forward")
        tensor = torch.empty(10)
        ledger.find(tensor)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(80)
        del tensor
    assert changes(ledger) == [40, -40, 80, -80]


def test_what_is_made_of_what_waits_on_the_host_waits_there_too() -> None:
    ledger = Ledger(512)
    with FakeTensorMode():
        there, here, number = torch.empty(300), torch.empty(300), torch.empty(())
        with ledger.making("pinned"):
            assert ledger.find(there).num_bytes == 2048, "torch's pinned blocks are powers of two"
            ledger.find(number)
        assert ledger.find(here).memory == "device" and ledger.uses_host
        assert ledger.find(there + 1, [there, here]).memory == "pageable"
        assert ledger.find(here + 1, [here, number]).memory == "device", "a number may lie anywhere"
        kept = there * 2
        assert ledger.find(kept, [there]).num_bytes == 1200, "pageable memory is as large as it is"
    assert [Stored(1, memory=memory).heirs for memory in ("device", "pinned")] == ["device", "pageable"]


def test_tensors_in_one_storage_share_it() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        both, alone = torch.empty(12), torch.empty(3)
        ledger.mark_parts([(both[:8], "up"), (both[8:], "down"), (alone, "norm")], "gradients")
        together, apart = ledger.find(both), ledger.find(alone)
        assert together.shares == {"up": 32, "down": 16} and apart.shares == {}
        assert {together.category, apart.category} == {"gradients"} and apart.module == "norm"
        ledger.mark_parts([(both[:8], "up"), (both[8:], "up")], "gradients")
        assert (together.module, together.shares) == ("up", {}), "what is said last holds"


def test_an_allocator_hands_out_whole_blocks() -> None:
    ledger = Ledger(512)
    with FakeTensorMode():
        ledger.begin("forward")
        tensor = torch.empty(129)
        ledger.place = ("gathered", "layers.0")
        assert ledger.find(tensor).num_bytes == 1024
        assert (ledger.find(tensor).category, ledger.find(tensor).module) == ("gathered", "layers.0")
        ledger.mark(tensor, "weights", "embedding")
        assert (ledger.find(tensor).category, ledger.find(tensor).module) == ("weights", "embedding")


def test_a_category_is_of_what_is_new() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        first, second, third = torch.empty(1), torch.empty(1), torch.empty(1)
        ledger.find(first)
        assert ledger.find(first.detach(), (), "logits").category is None
        assert ledger.find(second, (), "logits").category == "logits"
        ledger.place = ("gathered", "layers.1")
        assert ledger.find(third, (), "logits").category == "gathered"
