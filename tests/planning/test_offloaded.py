"""What nothing holds on its devices, and the host's memory does."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Cluster
from allranks.config import LayoutConfig
from allranks.planning.answer import make_plan
from allranks.planning.document import plan_document
from allranks.planning.estimate import estimate
from allranks.planning.hardware import find_cluster
from allranks.planning.offloaded import with_parameters_on_host
from allranks.planning.question import Question
from tests.planning.questions import ask

NODE = find_cluster("8:a100-80g")


def seventy(where: Cluster = NODE, **changes: Any) -> Question:
    return replace(ask("llama3-70b", "8:a100-80g", 64, micro_batch=1).on(where), **changes)


def test_the_verdict_has_what_fits_with_parameters_in_the_hosts_memory() -> None:
    plan = make_plan(seventy())
    assert plan.best is None and plan.closest is not None and plan.offloaded is not None
    found = plan.offloaded.estimate
    assert found.fits and found.choice.layout.offload == "parameters"
    assert found == estimate(seventy().space().profiles["bfloat16"], NODE, found.choice)
    because = plan.offloaded.because
    assert because.startswith("may fit with offload=parameters: ")
    assert plan_document(plan)["offloaded"]["fits"] == "unknown"
    assert "1.1 TB in each host's memory (nobody says how much it has: host_memory_gb in a cluster file)" in because
    slower = found.samples_per_second / plan.closest.estimate.samples_per_second - 1
    assert f"{slower:+.0%} speed beside the closest" in because and slower < -0.3
    assert because.endswith("; ask for it: --layout auto,offload=parameters")


def test_what_the_command_asks_for_is_what_the_verdict_promised() -> None:
    plan = make_plan(seventy())
    asked = make_plan(seventy(modes={"offload": "parameters"}))
    assert plan.offloaded is not None and asked.best is not None
    assert asked.best.estimate == plan.offloaded.estimate and asked.offloaded is None


def test_a_host_that_is_too_small_is_no_way_out() -> None:
    small, large = (replace(NODE, host_memory_bytes=size) for size in (1.0e12, 2.0e12))
    assert make_plan(seventy(small)).offloaded is None
    plan = make_plan(seventy(large))
    assert plan.offloaded is not None and "in each host's memory of 1.6 TB" in plan.offloaded.because
    assert plan.offloaded.because.startswith("fits with ") and plan_document(plan)["offloaded"]["fits"] is True
    first = plan.closest
    assert first is not None
    checked = with_parameters_on_host(seventy(large).space(), first.estimate, checked=True)
    assert checked is not None and "; --check has not rehearsed it; ask for it: " in checked.because


def test_a_written_layout_keeps_its_degrees() -> None:
    plan = make_plan(seventy(layout=LayoutConfig(dp_shard=8, recompute="full")))
    assert plan.best is None and plan.offloaded is not None
    assert str(plan.offloaded.estimate.choice.layout) == "dp_shard=8,recompute=full,offload=parameters"
    assert plan.offloaded.because.endswith("ask for it: --layout dp_shard=8,recompute=full,offload=parameters")


@pytest.mark.parametrize("changes", [{"modes": {"offload": "none"}}, {"modes": {"offload": "activations"}}])
def test_another_offload_that_the_user_fixed_stays(changes: dict[str, Any]) -> None:
    assert make_plan(seventy(**changes)).offloaded is None


def test_what_fits_needs_no_second_search() -> None:
    plan = make_plan(ask())
    assert plan.best is not None and plan.offloaded is None
