"""Activations that wait in the host's memory: what stays, what is waited for, whether the host has room."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Cluster
from allranks.layout import Layout
from allranks.plan import Choice, Estimate
from allranks.planning.estimate import estimate, estimate_setting
from allranks.planning.host_traffic import host_capacity_bytes, vendors_host
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.setting import Setting
from tests.planning.profiles import cluster, decoder

PROFILE = decoder(layers=32, hidden=1024, ffn=4096, seq=2048, heads=8, vocab=64)


def weigh(there: Cluster, **modes: Any) -> Estimate:
    return estimate(PROFILE, there, Choice(Layout(dp_replicate=8, **modes), 64, 8))


def test_a_fast_link_hides_the_moves() -> None:
    kept, moved = (weigh(cluster(host_bandwidth=1e12), offload=mode) for mode in ("none", "activations"))
    assert moved.time.offload == 0.0
    assert moved.step_seconds.expected == kept.step_seconds.expected
    assert 0 < moved.memory.activations < 0.2 * kept.memory.activations


def test_what_the_link_does_not_hide_is_waited_for() -> None:
    slow = weigh(cluster(host_bandwidth=1e9), offload="activations")
    slower = weigh(cluster(host_bandwidth=0.5e9), offload="activations")
    assert slow.time.offload > 0
    # What is added is what moves twice, at half the rate: all of it beyond the computation of both directions.
    moved = slow.host_bytes / 8
    assert slower.time.offload - slow.time.offload == pytest.approx(moved * 2 * (1 / 0.5e9 - 1 / 1e9))
    assert slower.step_seconds.expected > slow.step_seconds.expected


def test_the_host_has_room_or_it_does_not_fit() -> None:
    roomy = weigh(cluster(host_memory_bytes=2e12), offload="activations")
    assert roomy.fits and roomy.host_capacity_bytes == 0.8 * 2e12
    full = weigh(cluster(host_memory_bytes=roomy.host_bytes), offload="activations")
    assert not full.fits
    assert weigh(cluster(host_memory_bytes=1.0)).fits


def test_recompute_leaves_less_to_move() -> None:
    plain = weigh(cluster(), offload="activations")
    inputs = weigh(cluster(), offload="activations", recompute="full")
    assert 0 < inputs.host_bytes < 0.5 * plain.host_bytes
    assert replace(plain.time, offload=0.0).total <= plain.time.total


def test_of_a_share_that_is_moved_the_rest_stays() -> None:
    def held(share: float) -> tuple[float, float]:
        how = Mechanisms(offloaded_share=share)
        setting = Setting(global_batch=64, micro_batch=8, dp=8, offload="activations", mechanisms=how)
        room = estimate_setting(PROFILE, cluster(), setting).room
        return room.memory.activations, room.host_bytes

    (all_stays, none_there), (half, there), (rest, all_there) = held(0.0), held(0.5), held(1.0)
    assert none_there == 0.0 and there == pytest.approx(all_there / 2)
    assert rest < half < all_stays and half == pytest.approx((rest + all_stays) / 2)


def test_a_host_that_nobody_described_is_the_vendors_and_is_said_to_be() -> None:
    there = cluster(1, 4, host_memory_bytes=None)
    assert host_capacity_bytes(there) is None and vendors_host(there) == ""
    vendors = replace(there, device=replace(there.device, host_memory_bytes=250e9))
    assert host_capacity_bytes(vendors) == 0.8 * 1e12
    assert vendors_host(vendors).startswith("each host is taken to have 1.0 TB, because the catalog's node of toy ")
    assert vendors_host(replace(vendors, host_memory_bytes=2e12)) == ""
    roomy = weigh(cluster(), offload="activations")  # of all eight processes of the node together
    share = roomy.host_bytes / 8
    for size, fits in ((share / 0.79, True), (share / 0.81, False)):
        there = cluster(host_memory_bytes=None)
        there = replace(there, device=replace(there.device, host_memory_bytes=size))
        assert weigh(there, offload="activations").fits is fits
