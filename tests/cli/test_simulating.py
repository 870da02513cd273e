"""From a request to what is simulated: which figure comes from where."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.simulating import STORAGE_PER_DEVICE, answer, costs_of, operation_of, simulation_of
from allranks.errors import ConfigError
from allranks.planning.hardware import find_cluster
from allranks.rehearsing.failure_rates import NAMED, find_failures
from allranks.simulation_request import SimulationRequest
from tests.commands import POINTS

CLUSTER = "8x8:a100-80g"


def test_a_checkpoint_is_twelve_bytes_a_parameter_through_the_storage() -> None:
    request = SimulationRequest(CLUSTER, ("100b",), storage=10.0)
    costs = costs_of(request, find_cluster(CLUSTER))

    assert costs.write_seconds == costs.load_seconds == pytest.approx(101.6e9 * 12 / 10e9, rel=0.01)
    assert costs.step_seconds > 1
    assert costs.replica_nodes >= 1


def test_a_tasks_checkpoint_holds_what_its_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in float64, an average of them, and nothing of an optimizer that keeps nothing."""
    # torch's compiler, which tracing imports, sets it where nobody did.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    keys = ("train.precision=float64", "optimizer.name=sgd", "train.ema=0.99")
    costs = costs_of(SimulationRequest("1:a100-80g", (POINTS, *keys), storage=1e-6), find_cluster("1:a100-80g"))
    assert "16 bytes a parameter" in costs.notes[0], costs.notes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"storage": 3.0}, "--storage belongs to a model: name one, such as llama3-405b; what storage costs, --save-"),
        ({"global_batch": 0}, "--global-batch belongs to a model"),
        ({"layout": "tp=8", "storage": 3.0}, "--layout and --storage belong to a model"),
    ],
)
def test_what_only_a_model_makes_a_figure_of_is_refused_without_one(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        costs_of(SimulationRequest(CLUSTER, **given), find_cluster(CLUSTER))


def test_what_takes_no_time_without_a_model_is_said() -> None:
    cluster = find_cluster(CLUSTER)
    (said,) = costs_of(SimulationRequest(CLUSTER, step="7s"), cluster).notes
    assert said.endswith("take what is given, and nothing where it is left out (--save-cost, --load)")
    (said,) = costs_of(SimulationRequest(CLUSTER, step="7s", save_cost="0", load="1min"), cluster).notes
    assert said.endswith("take what is given")


@pytest.mark.full
def test_what_the_user_gives_comes_before_the_plan() -> None:
    request = SimulationRequest(CLUSTER, ("100b",), step="7s", save_cost="2s", load="0")
    costs = costs_of(request, find_cluster(CLUSTER))

    assert (costs.step_seconds, costs.save_seconds, costs.load_seconds) == (7.0, 2.0, 0.0)
    assert costs.write_seconds == pytest.approx(101.6e9 * 12 / (64 * STORAGE_PER_DEVICE), rel=0.01)


@pytest.mark.full
def test_the_clusters_own_storage_comes_before_llama_3s() -> None:
    request, cluster = SimulationRequest(CLUSTER, ("100b",)), replace(find_cluster(CLUSTER), storage_bandwidth=2e9)
    costs = costs_of(request, cluster)
    assert costs.write_seconds == pytest.approx(101.6e9 * 12 / 16e9, rel=0.01)
    assert any("16.0 GB/s, because" in note and "storage_gb_per_s" in note for note in costs.notes), costs.notes
    assert costs_of(replace(request, storage=10.0), cluster).write_seconds == pytest.approx(101.6e9 * 1.2e-9, rel=0.01)


def test_what_is_taken_from_llama_3_goes_by_devices_and_not_by_nodes() -> None:
    """As many GPUs in small nodes fail as often, and have as much storage."""
    whole, *small = (
        simulation_of(SimulationRequest(f"{nodes}:h100", days=54, every="10min", runs=1))
        for nodes in ("2048x8", "4096x4", "16384x1")
    )
    for found in small:
        nodes = found.chosen.operation.nodes
        assert found.failures.per_second(nodes) == pytest.approx(whole.failures.per_second(2048))
        assert any(f"a node of {16384 // nodes} fails" in note for note in found.notes), found.notes
    assert not any("times as often" in note for note in whole.notes)
    one, other = (find_cluster(name) for name in ("8x8:a100-80g", "64x1:a100-80g"))
    request = SimulationRequest(CLUSTER, ("gpt2",), layout="ddp", global_batch=64)
    assert costs_of(request, one).write_seconds == pytest.approx(costs_of(request, other).write_seconds)


@pytest.mark.full
def test_the_interval_is_no_shorter_than_a_save_takes() -> None:
    request = SimulationRequest(CLUSTER, ("100b",), storage=1.0)
    cluster = find_cluster(CLUSTER)
    costs = costs_of(request, cluster)
    operation, notes = operation_of(request, cluster, costs, NAMED["llama3"])

    assert operation.tiers[-1].every_seconds >= costs.write_seconds
    assert any("spare nodes, because" in note for note in notes)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("step", "0s", "--step 0s: takes more than no time; --step 10s, say, or leave it out"),
        ("every", "0", "--every 0: takes more than no time; --every 10min, say, or leave it out"),
        ("storage", 0.0, "--storage 0: is more than 0 GB/s; --storage 200, say, or leave it out"),
        ("storage", -1.0, "--storage -1: is more than 0 GB/s; --storage 200, say, or leave it out"),
    ],
)
def test_what_cannot_be_nothing_is_refused_in_one_line(option: str, value: str | float, said: str) -> None:
    given: dict[str, Any] = {"step": "10s", "save_cost": "0s", option: value}
    with pytest.raises(ConfigError) as caught:
        simulation_of(SimulationRequest(CLUSTER, **given))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"days": 0.0}, "--days 0: more than 0 and at most 3650"),
        ({"days": 3651.0}, "--days 3651: more than 0 and at most 3650"),
        ({"spares": -1}, "--spares -1: at least 0"),
        ({"runs": 0}, "--runs 0: at least 1"),
    ],
)
def test_of_the_counts_the_one_that_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulation_of(SimulationRequest(CLUSTER, **given))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "1.0 s, because a save costs training nothing, and a shorter one is not looked at"),
        ({"step": "7s"}, "7.0 s, because a step takes so long, and a save costs training nothing"),
        ({"step": "7s", "save_cost": "1ms"}, "7.0 s, because a step takes so long, and Daly's formula says less"),
        (
            {"save_cost": "1ms", "failures": "1e5"},
            "1.0 s, because Daly's formula says less, and a shorter one is not looked at",
        ),
        ({"save_cost": "1min"}, " s, because Daly's formula says so"),
        ({"save_cost": "20d"}, "20 d 00 h, because a save takes so long, and Daly's formula says less"),
        ({"failures": "0"}, "30 d 00 h, because nothing fails: that is the whole run"),
    ],
)
def test_why_an_interval_is_chosen_is_true(given: dict[str, Any], said: str) -> None:
    request, cluster = SimulationRequest(CLUSTER, **{"failures": "1000", **given}), find_cluster(CLUSTER)
    model, _ = find_failures(request.failures, 8)
    _, notes = operation_of(request, cluster, costs_of(request, cluster), model)
    assert notes[-1].startswith("a checkpoint every ") and notes[-1].endswith(said), notes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"storage": 1e-9}, "--storage 1e-09: to write a checkpoint takes 14113042 d 12 h, longer than the run of 30 "),
        ({"days": 0.001}, "to write a checkpoint takes 9 min 32 s, longer than the run of 1 min 26 s: give more GB/s"),
        ({"save_cost": "31d"}, "--save-cost 31d: a save takes 31 d 00 h, longer than the run of 30 d 00 h: give less "),
    ],
)
def test_a_save_that_takes_longer_than_the_run_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulation_of(SimulationRequest(CLUSTER, ("100b",), **given))
    assert str(caught.value).startswith(said) and str(caught.value).endswith(", or more --days")


def test_a_cluster_of_nothing_is_refused() -> None:
    for cluster in ("0x8:h100", "8x0:h100"):
        with pytest.raises(ConfigError, match="no devices; give at least 1 of each"):
            simulation_of(SimulationRequest(cluster))


@pytest.mark.parametrize("json", [False, True])
def test_the_target_is_checked_first_and_the_result_is_told_before_it_is_written(
    json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        answer(SimulationRequest(CLUSTER, step="nonsense", html=tmp_path))
    request = SimulationRequest(
        CLUSTER, step="10s", save_cost="1s", runs=2, days=1.0, html=tmp_path / "a.html", json=json
    )
    monkeypatch.setattr("allranks.durable.sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert answer(request) == 2
    told = capsys.readouterr()
    assert told.out.startswith("{") == json and ("goodput" if json else "Goodput") in told.out
    assert told.err.endswith("a.html cannot be written: No space left; name another place\n")
