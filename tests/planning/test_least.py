"""The bound that lets `--gpus ?` leave numbers of devices out: nothing that is estimated lies below it."""

from dataclasses import replace
from itertools import islice

import pytest

from allranks.planning.choices import Space, every_choice
from allranks.planning.estimate import estimate
from allranks.planning.hardware import find_cluster
from allranks.planning.least import least_device_seconds, least_over
from tests.planning.profiles import cluster, decoder
from tests.planning.questions import ask


@pytest.mark.parametrize(
    ("model", "where", "precision"),
    [
        ("llama3-8b", "1x8:a100-80g", "bfloat16"), ("gpt2", "1x4:h100", "bfloat16"), ("gpt2", "1x2:v100", "float16"),
        ("mixtral-8x7b", "2x8:h100", "bfloat16"), ("llama3-8b", "1x8:h100", "float8"), ("gpt2", "1x2:h100", "float32"),
        ("llama3-8b", "1x8:b200", "bfloat16"),
    ],
)  # fmt: skip
def test_no_estimate_is_below_it(model: str, where: str, precision: str) -> None:
    there = find_cluster(where)
    profile = ask(model, where).make_profile(32768 if model == "llama3-8b" else None, precision)
    least = least_device_seconds(profile, there, precision)
    assert least > 0
    choices = list(islice(every_choice(Space({precision: profile}, there, 64)), 4000))
    assert len(choices) > 20
    for choice in choices[:: max(1, len(choices) // 100)]:
        seconds = estimate(profile, there, choice).step_seconds.expected
        assert least * 64 <= seconds * there.num_devices * (1 + 1e-9), choice.layout


def test_it_is_not_far_below() -> None:
    """A third of the best at least: else it would leave nothing out."""
    there = find_cluster("1x8:a100-80g")
    profile = ask().make_profile(4096, "bfloat16")
    best = min(
        estimate(profile, there, choice).step_seconds.expected
        for choice in islice(every_choice(Space({"bfloat16": profile}, there, 64)), 400)
    )
    assert least_device_seconds(profile, there, "bfloat16") * 64 / 8 > best / 3


def test_a_limit_beyond_it_is_out_of_reach() -> None:
    asked = ask(tokens=1e12, limit_seconds=86400.0)
    over = least_over(asked)
    assert over == pytest.approx(least_over(replace(asked, limit_seconds=2 * 86400.0)) * 2)
    assert least_over(replace(asked, limit_seconds=None)) == 0.0
    priced = replace(asked, limit_seconds=None, limit_money=1.0, cluster=replace(asked.cluster, device_hour_price=3.0))
    assert least_over(priced) == pytest.approx(over * 86400.0 * 16 / 3600 * 3.0)
    assert least_over(replace(priced, tokens=None)) == 0.0


def test_measured_devices_have_no_bound() -> None:
    there = cluster()
    assert least_device_seconds(decoder(), there, "bfloat16") > 0
    measured = replace(there, device=replace(there.device, measured=True))
    assert least_device_seconds(decoder(), measured, "bfloat16") == 0.0
