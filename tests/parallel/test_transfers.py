"""Every tensor that goes from device to device is recorded, and so is its gradient."""

import pytest
import torch
from torch import nn

from allranks.layout import Layout
from allranks.parallel.share import share_of
from allranks.parallel.transfers import Transfer, Transfers

SHARE = share_of(Layout(kind="placement"))
ZERO, ONE = SHARE.used


def there_and_back(transfers: Transfers) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf on the first device, and the same on the second."""
    leaf = torch.arange(4.0, requires_grad=True)
    transfers.note(leaf, ZERO)
    return leaf, transfers.carry(leaf, ONE, "part")


def test_a_tensor_and_its_gradient_are_recorded() -> None:
    transfers = Transfers(SHARE)
    with transfers.recorded() as found:
        leaf, moved = there_and_back(transfers)
        assert (transfers.locate(leaf), transfers.locate(moved)) == (ZERO, ONE)
        assert moved is not leaf and torch.equal(moved, leaf)
        assert moved.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
        (moved * 3).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [3.0] * 4
    assert list(found) == [
        Transfer("part", 16, "cpu:0", "cpu:1"),
        Transfer("part", 16, "cpu:1", "cpu:0", backward=True),
    ]
    there_and_back(transfers)
    assert len(found) == 2, "nothing is kept outside"


def test_what_is_there_already_stays_the_same_object() -> None:
    transfers = Transfers(SHARE)
    fresh = torch.ones(2)
    value = {"a": [fresh, "word"], "b": None}
    assert transfers.locate(fresh) == SHARE.home == ONE
    assert transfers.carry(value, ONE, "part") is value
    moved = transfers.carry(value, ZERO, "part")
    assert moved["a"][0] is not fresh and moved["a"][1:] == ["word"] and value["a"][0] is fresh


def test_a_table_travels_once_until_it_changes() -> None:
    transfers = Transfers(SHARE)
    table = torch.ones(3)
    with transfers.recorded() as found:
        first, second = (transfers.carry(table, ZERO, name) for name in "ab")
        assert first is second and len(found) == 1
        table.add_(1)
        assert transfers.carry(table, ZERO, "c").tolist() == [2.0] * 3 and len(found) == 2
        parameter = nn.Parameter(torch.ones(3), requires_grad=False)
        assert transfers.carry(parameter, ZERO, "a") is not transfers.carry(parameter, ZERO, "b")
        with torch.inference_mode():
            assert transfers.carry(torch.ones(3), ZERO, "a").tolist() == [1.0] * 3


def test_a_gradient_of_a_gradient_comes_back_too() -> None:
    transfers = Transfers(SHARE)
    with transfers.recorded() as found:
        leaf, moved = there_and_back(transfers)
        (gradient,) = torch.autograd.grad((moved**3).sum(), leaf, create_graph=True)
        gradient.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [6 * value for value in range(4)]
    assert all({one.source, one.target} == {"cpu:0", "cpu:1"} for one in found)
    assert sum(one.backward for one in found) >= 3


@pytest.mark.gpu
def test_between_host_and_gpu() -> None:
    share = share_of(Layout(kind="placement", placement=(("a", "cuda:0"), ("b", "cpu"))), (torch.device("cuda:0"),))
    transfers = Transfers(share)
    leaf = torch.arange(4.0, requires_grad=True)
    assert transfers.locate(leaf).name == "cpu:0"
    with transfers.recorded() as found:
        moved = transfers.carry(leaf, share.find("cuda:0"), "a")
        assert moved.device == torch.device("cuda:0") and transfers.locate(moved).name == "cuda:0"
        back = transfers.carry(moved * 2, share.find("cpu"), "b")
        assert back.device.type == "cpu"
        back.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 4
    assert [(one.source, one.target, one.backward) for one in found] == [
        ("cpu:0", "cuda:0", False),
        ("cuda:0", "cpu:0", False),
        ("cpu:0", "cuda:0", True),
        ("cuda:0", "cpu:0", True),
    ]
