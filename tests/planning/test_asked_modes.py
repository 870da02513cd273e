"""Modes that the user asked for: which are taken, and which of them no plan weighs."""

import dataclasses
from typing import Any

import pytest

from allranks.config_sections import AXES, LayoutConfig
from allranks.planning.asked_modes import UNWEIGHED, modes_of, notes_of
from allranks.planning.estimate import estimate
from tests.planning.profiles import choose, cluster, decoder


def test_what_differs_and_what_was_named() -> None:
    config = LayoutConfig(recompute="full", gather="float32", local_sgd=5)
    assert modes_of(config, {}) == {"recompute": "full", "gather": "float32", "local_sgd": 5}
    assert modes_of(LayoutConfig(), {"offload": "none", "sharding": None, "dp_shard": 1}) == {"offload": "none"}


@pytest.mark.parametrize("name", UNWEIGHED)
def test_a_note_for_each_that_no_plan_weighs(name: str) -> None:
    other = {"batchnorm": "local", "static_graph": True, "outer_nesterov": False}.get(name, 0.5)
    config = LayoutConfig.model_construct(**{**LayoutConfig().model_dump(), name: other})
    written = str(other).lower()
    assert notes_of(config)[0].startswith(f"layout.{name}={written} is kept, and no plan weighs it")


def test_no_note_of_what_a_plan_weighs() -> None:
    assert notes_of(LayoutConfig(dp_shard=2, recompute="full", gather="bfloat16", compile="block")) == ()
    assert notes_of(LayoutConfig(ddp_hook="bfloat16")) == ()
    assert len(notes_of(LayoutConfig(ddp_hook="powersgd"))) == 1


def test_every_mode_is_weighed_or_noted() -> None:
    """What changes no figure of any layout here would have to be among the UNWEIGHED."""
    weighed = {"sharding", "schedule", "recompute", "offload", "compile", "gather", "prefetch", "ddp_hook", "context"}
    modes = set(LayoutConfig.model_fields) - {*AXES, "kind", "placement"}
    assert modes == weighed | set(UNWEIGHED)
    changes: dict[str, Any] = {
        "local_sgd": 10,
        "static_graph": True,
        "powersgd_rank": 2,
        "ddp_bucket_mb": 1.0,
        "batchnorm": "local",
    }
    plain = estimate(decoder(), cluster(1, 8), choose(dp_replicate=8))
    for name, value in changes.items():
        found = estimate(decoder(), cluster(1, 8), choose(**{"dp_replicate": 8, name: value}))
        assert dataclasses.replace(found, choice=plain.choice) == plain, name
