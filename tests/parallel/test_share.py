"""The devices of a process, as rules name them."""

import pytest
import torch

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.share import Place, share_of

GPUS = tuple(torch.device("cuda", index) for index in (2, 3))
BALANCED = Layout(kind="placement")


def ruled(*devices: str) -> Layout:
    return Layout(kind="placement", placement=tuple((f"part{i}", device) for i, device in enumerate(devices)))


@pytest.mark.parametrize(
    ("layout", "accelerators", "first", "home"),
    [
        (BALANCED, (), "cpu:0", "cpu:1"),
        (BALANCED, GPUS, "cuda:0", "cuda:1"),
        (ruled("cpu:2", "cpu:1"), (), "cpu:0", "cpu:2"),
        (ruled("cpu"), (), "cpu:0", "cpu:0"),
        (ruled("cuda:0", "cpu"), GPUS, "cuda:0", "cuda:0"),
        (ruled("cuda:1"), GPUS, "cuda:0", "cuda:1"),
        (ruled("cpu"), GPUS, "cuda:0", "cuda:0"),
    ],
)
def test_batch_and_loss_are_on_the_last_device_in_use(
    layout: Layout, accelerators: tuple[torch.device, ...], first: str, home: str
) -> None:
    share = share_of(layout, accelerators)
    assert (share.first.name, share.home.name) == (first, home)


def test_devices_are_numbered_within_the_share() -> None:
    share = share_of(BALANCED, GPUS)
    assert share.find("cuda") == share.find("cuda:0") == Place("cuda:0", torch.device("cuda:2"))
    assert str(share.find("cuda:1")) == "cuda:1 (cuda:3 here)"
    assert str(share.find("cpu")) == "cpu:0"
    assert [place.name for place in share.used] == ["cuda:0", "cuda:1"]
    assert str(Place("cuda:1", torch.device("cuda:1"))) == "cuda:1"


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    there = "cpu:0 to cpu:7 \\(one memory\\)$"
    with pytest.raises(LayoutError, match=f"names device 'cuda:0', and this process has {there}"):
        share_of(ruled("cpu", "cuda:0"))
    with pytest.raises(LayoutError, match=f"names device 'cuda:2', and this process has cuda:0, cuda:1, {there}"):
        share_of(ruled("cuda:2"), GPUS)
    with pytest.raises(LayoutError, match="names device 'gpu'"):
        share_of(ruled("gpu"))
