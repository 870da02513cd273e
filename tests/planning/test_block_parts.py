"""What configurations share is made once, and never shared where they differ."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.planning import block_parts
from allranks.planning.block_cost import block_cost, block_work
from allranks.planning.block_parts import Parts, forget, parameters_of, parts_of
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.setting import Setting
from tests.planning.profiles import cluster, decoder

PROFILE, THERE = decoder(experts=4), cluster(1, 8)
OURS = Mechanisms(keeps_gathered_inputs=True)
SETTING = Setting(global_batch=64, micro_batch=1, dp=2, tp=2, pp=2, shard=2, zero=3, mechanisms=OURS)


def afresh(setting: Setting) -> Parts:
    forget()
    return parts_of(PROFILE, THERE, setting)


CHANGES: list[dict[str, Any]] = [
    {"tp": 4, "dp": 1}, {"cp": 2, "dp": 1}, {"micro_batch": 4}, {"recompute": "full"}, {"recompute": "selective"},
    {"precision": "float32"}, {"dp": 4, "pp": 1}, {"shard": 1}, {"mechanisms": Mechanisms(fusion=0.5)},
    {"frozen": True}, {"ep": 2}, {"cp": 2, "dp": 1, "ring": False}, {"pp": 4, "dp": 1}, {"global_batch": 32},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_is_kept_is_what_would_be_made(change: dict[str, Any]) -> None:
    changed = replace(SETTING, **change)
    made = afresh(changed)
    afresh(SETTING)
    found = parts_of(PROFILE, THERE, changed)
    assert (found.costs, found.axes) == (made.costs, made.axes)


def test_the_same_is_not_made_again() -> None:
    first = afresh(SETTING)
    assert parts_of(PROFILE, THERE, replace(SETTING, global_batch=128)) is first
    assert parts_of(PROFILE, THERE, replace(SETTING, dp=1, pp=4)).costs is first.costs
    assert parts_of(decoder(layers=2), THERE, SETTING) is not first
    assert parts_of(PROFILE, cluster(1, 8), SETTING) is not first


def test_what_was_kept_is_dropped_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = afresh(SETTING)
    monkeypatch.setattr(block_parts, "_CACHE_SIZE", 1)
    parts_of(PROFILE, THERE, replace(SETTING, tp=1))
    assert len(block_parts._CACHE) == len(block_parts._WORK) == 1
    again = parts_of(PROFILE, THERE, SETTING)
    assert again is not first and again.costs == first.costs


def test_each_block_has_its_own_cost() -> None:
    found = afresh(SETTING)
    for block, cost in zip(PROFILE.blocks, found.costs, strict=True):
        assert cost == block_cost(block, SETTING, block_work(block, SETTING, found.axes, PROFILE.experts))


def test_parameters_of_a_stage() -> None:
    found = afresh(SETTING)
    one, several = (parameters_of(found, (0, number, 0)) for number in (1, 3))
    assert several[0] == 3 * one[0] > 0 and several[1] == one[1] == 0.0
