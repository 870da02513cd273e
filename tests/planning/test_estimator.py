"""What a search asks: an estimate made after its room was asked for is the same, and finds no room again."""

import importlib
from typing import Any

import pytest

from allranks.cluster import Cluster
from allranks.planning.estimate import estimate
from allranks.planning.estimator import Formulas
from allranks.planning.hardware import find_cluster
from allranks.planning.room import room_of
from tests.planning.profiles import choose, decoder

CLUSTER: Cluster = find_cluster("2x8:a100-80g")


def test_an_estimate_after_its_room_is_the_one_without() -> None:
    formulas, profile = Formulas(), decoder()
    for choice in (choose(64, 4, dp_shard=16), choose(64, 1, dp_replicate=2, tp=8), choose(64, 2, pp=4, dp_shard=4)):
        plain = estimate(profile, CLUSTER, choice)
        room = formulas.fit(profile, CLUSTER, choice)
        assert room == room_of(profile, CLUSTER, choice) and room.fits == plain.fits
        assert formulas.estimate(profile, CLUSTER, choice) == plain


def test_the_room_of_another_choice_or_cluster_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("allranks.planning.estimate")
    asked: list[object] = []
    room_under = module.room_under

    def note(*given: Any) -> Any:
        asked.append(given)
        return room_under(*given)

    monkeypatch.setattr(module, "room_under", note)
    formulas, profile, other = Formulas(), decoder(), find_cluster("2x8:h100")
    first, second = choose(64, 4, dp_shard=16), choose(64, 2, dp_shard=16)
    formulas.fit(profile, CLUSTER, first)
    assert formulas.estimate(profile, CLUSTER, first) == estimate(profile, CLUSTER, first)
    assert len(asked) == 1, "by the second alone"
    for where, choice in ((CLUSTER, second), (other, first)):
        assert formulas.estimate(profile, where, choice) == estimate(profile, where, choice)
    assert len(asked) == 5
