"""The interval: wider where causes are doubtful, and as wide as its parts say."""

import math
from dataclasses import replace
from typing import Any

import pytest

from allranks.plan import StepTime
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.setting import Setting
from allranks.planning.uncertainty import (
    DOUBTS,
    EXPERTS,
    HOST,
    LOW_PRECISION,
    NINETY,
    UNKNOWN_DEVICE,
    UNKNOWN_FRAMEWORK,
    spread_of,
)
from tests.planning.profiles import decoder

PROFILE = decoder()
SETTING = Setting(global_batch=8, micro_batch=1)


def test_computation_alone() -> None:
    assert spread_of(StepTime(compute=2.0), PROFILE, SETTING, True, 0.0) == math.exp(NINETY * DOUBTS["compute"])


def test_doubts_of_two_causes_add_as_squares() -> None:
    got = spread_of(StepTime(compute=3.0, data=1.0), PROFILE, SETTING, True, 0.0)
    both = math.hypot(0.75 * DOUBTS["compute"], 0.25 * DOUBTS["data"])
    assert got == pytest.approx(math.exp(NINETY * both))


@pytest.mark.parametrize(
    ("more", "known", "host", "added"),
    [
        ({"precision": "float8"}, True, 0.0, LOW_PRECISION),
        ({}, False, 0.0, UNKNOWN_DEVICE),
        ({"mechanisms": Mechanisms(known=False)}, True, 0.0, UNKNOWN_FRAMEWORK),
        ({}, True, 0.5, HOST / 2),
    ],
)
def test_what_widens_it(more: dict[str, Any], known: bool, host: float, added: float) -> None:
    setting = replace(SETTING, **more)
    got = spread_of(StepTime(compute=1.0), PROFILE, setting, known, host)
    assert got == pytest.approx(math.exp(NINETY * (DOUBTS["compute"] + added)))


def test_experts_widen_it() -> None:
    got = spread_of(StepTime(compute=1.0), decoder(experts=8), SETTING, True, 0.0)
    assert got == pytest.approx(math.exp(NINETY * (DOUBTS["compute"] + EXPERTS)))


def test_every_cause_has_a_doubt() -> None:
    assert set(DOUBTS) == set(StepTime.__dataclass_fields__)


def test_no_time_leaves_no_doubt() -> None:
    assert spread_of(StepTime(), PROFILE, SETTING, True, 0.0) == 1.0
