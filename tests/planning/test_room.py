"""The bytes of a configuration, asked for alone, are those of its estimate."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.named_models import find_model
from allranks.planning.choices import Space, every_choice
from allranks.planning.estimate import estimate
from allranks.planning.hardware import find_cluster
from allranks.planning.host_traffic import HOST_SHARE, host_capacity_bytes
from allranks.planning.room import MEMORY_HIGH, MEMORY_LOW, PEAK_HIGH, USABLE, room_of, shared_with_host, usable_bytes
from tests.planning.profiles import choose, cluster, decoder

HOSTS: dict[str, Any] = {"host_memory_bytes": 4e9, "host_bandwidth": 20e9}


def test_it_is_what_an_estimate_says_of_every_choice() -> None:
    """Where a device says what it holds before a model, too, and where a host has too little."""
    profile = find_model("gpt2-xl").profile(1024)
    verdicts = set()
    own = find_cluster("1x2:v100")
    own = replace(own, device=replace(own.device, context_bytes=9e9))
    for where in (replace(find_cluster("1x4:a100-40g"), **HOSTS), own):
        for choice in list(every_choice(Space({"float32": profile}, where, 8)))[::7]:
            found, room = estimate(profile, where, choice), room_of(profile, where, choice)
            assert room.fits == found.fits
            verdicts.add((found.fits, found.fits_host))
            for name in ("memory", "stages", "peak_bytes", "capacity_bytes", "host_bytes", "host_capacity_bytes"):
                assert getattr(room, name) == getattr(found, name), (name, choice)
    assert verdicts == {(True, True), (False, True), (False, False)}


def test_the_peak_and_its_interval() -> None:
    there = cluster(1, 4, memory_bytes=80e9)
    room = room_of(decoder(), there, choose(16, 4, dp_shard=4))
    assert room.capacity_bytes == USABLE * 80e9
    assert room.peak_bytes.low == MEMORY_LOW * room.memory.total
    assert room.peak_bytes.expected == room.memory.total + room.slack_bytes
    assert room.peak_bytes.high == PEAK_HIGH * room.peak_bytes.expected


@pytest.mark.parametrize(("share", "fits"), [(0.99, True), (1.01, False)])
def test_a_fit_has_room_for_what_is_in_use_and_a_little_more(share: float, fits: bool) -> None:
    """What the allocator holds beyond that goes back where the device is full."""
    choice, there = choose(16, 4, dp_shard=4), cluster(1, 4)
    used = room_of(decoder(), there, choice).memory.total
    smaller = replace(there.device, memory_bytes=MEMORY_HIGH * used / USABLE / share)
    assert room_of(decoder(), replace(there, device=smaller), choice).fits is fits


def test_processes_on_a_processor_leave_the_system_what_it_needs() -> None:
    """Together they may fill four fifths of the machine, as what GPUs move to their host may."""
    two = find_cluster("1x2:cpu")
    assert two.host_memory_bytes is not None and host_capacity_bytes(two) == HOST_SHARE * two.host_memory_bytes
    assert 2 * usable_bytes(two.device) == pytest.approx(HOST_SHARE * two.host_memory_bytes)
    choice = choose(16, 1, dp_shard=2)
    assert room_of(decoder(), two, choice).capacity_bytes == usable_bytes(two.device)
    assert ", 80% of its share of the machine's memory" in shared_with_host(two)
    assert shared_with_host(cluster()) == ""


def test_of_equal_stages_the_fullest_is_weighed() -> None:
    """Under interleaved_zb, where halves of weights wait, the last of them; else the first."""
    profile, where = decoder(layers=32), cluster(devices=8)
    for schedule, fullest in (("interleaved", 1), ("interleaved_zb", 6)):
        found = room_of(profile, where, choose(128, pp=8, schedule=schedule)).stages
        assert max((one for one in found if 0 < one < 7), key=lambda one: found[one].activations) == fullest
