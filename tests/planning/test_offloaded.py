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
UNKNOWN = replace(NODE, device=replace(NODE.device, host_memory_bytes=None))


def seventy(where: Cluster = NODE, **changes: Any) -> Question:
    return replace(ask("llama3-70b", "8:a100-80g", 64, micro_batch=1).on(where), **changes)


def test_the_verdict_has_what_fits_with_parameters_in_the_hosts_memory() -> None:
    plan = make_plan(seventy(UNKNOWN))
    assert plan.best is None and plan.closest is not None and plan.offloaded is not None
    found = plan.offloaded.estimate
    assert found.fits and found.choice.layout.offload == "parameters"
    assert found == estimate(seventy().space().profiles["bfloat16"], UNKNOWN, found.choice)
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
    refused = make_plan(seventy(small))
    assert refused.offloaded is None
    by_host = refused.refusals[0]
    assert by_host.rule == "host_memory" and by_host.layout.endswith(",offload=parameters")
    assert "TB in a host's memory, which has 800.0 GB for what is moved there (80% of its 1.0 TB)" in by_host.because
    plan = make_plan(seventy(large))
    assert plan.offloaded is not None and "in each host's memory of 1.6 TB" in plan.offloaded.because
    assert plan.offloaded.because.startswith("fits with ") and plan_document(plan)["offloaded"]["fits"] is True
    first = plan.closest
    assert first is not None
    checked = with_parameters_on_host(seventy(large).space(), first.estimate, checked=True)
    assert checked is not None and "; --check has not rehearsed it; ask for it: " in checked.because


def test_the_host_of_the_vendor_is_held_to_and_said() -> None:
    plan = make_plan(seventy())
    assert plan.offloaded is not None and "1.1 TB in each host's memory of 1.6 TB" in plan.offloaded.because
    assert plan.offloaded.because.startswith("fits with ") and plan_document(plan)["offloaded"]["fits"] is True
    note = "each host is taken to have 2.0 TB, because the catalog's node of a100-80g has as much for as many devices"
    assert any(one.startswith(note) for one in plan.notes)


def test_an_asked_layout_that_fills_the_host_is_refused_by_name() -> None:
    little = replace(NODE, host_memory_bytes=1e11)
    plan = make_plan(seventy(little, layout=LayoutConfig(dp_shard=8, recompute="full", offload="parameters")))
    assert plan.best is None and plan.refusals[0].rule == "host_memory"
    assert plan.refusals[0].layout == "dp_shard=8,recompute=full,offload=parameters"
    assert "which has 80.0 GB for what is moved there (80% of its 100.0 GB)" in plan.refusals[0].because


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
