"""What formulas say of an Operation."""

import math
from dataclasses import replace

import pytest

from allranks.rehearsing.expectations import (
    best_interval,
    closed_form,
    enough_spares,
    mean_seconds_between,
    with_interval,
)
from allranks.rehearsing.failure_rates import NAMED
from allranks.simulation import DAY, Component, FailureModel, Operation, Scope, Tier

NONE = FailureModel("none", ())


def operate(every: float, *, save: float = 0.0) -> Operation:
    return Operation(2000, 0, 54 * DAY, (Tier("storage", Scope.RACK, every, save),), 0.0, 300.0)


def test_more_tiers_or_stragglers_have_no_formula() -> None:
    slow = FailureModel("x", (), stragglers_per_1000_node_days=1.0)
    two = replace(operate(600.0), tiers=(Tier("peer", Scope.NODE, 60.0), *operate(600.0).tiers))

    for operation, model in ((operate(600.0), slow), (two, NONE)):
        expected = (None, "the formula knows one tier of checkpoints and no stragglers")
        assert closed_form(operation, model) == expected


def test_what_does_not_come_at_a_constant_rate_has_no_formula() -> None:
    flaps = Component("link", 6.5, Scope.PROCESS, 0.0, burst_failures=0.5)

    assert closed_form(operate(600.0), FailureModel("x", (flaps,))) == (
        None,
        "the formula takes failures at a constant rate: those of link come in bursts",
    )


def test_a_row_of_racks_has_no_formula() -> None:
    """No spares replace it, and how long a run waits then no formula says."""
    spine = Component("spine", 0.01, Scope.ROW, 3600.0)

    assert closed_form(operate(600.0), FailureModel("x", (spine,))) == (
        None,
        "the formula has a spare for every lost node: spine takes a row of racks at once",
    )
    assert closed_form(operate(600.0), FailureModel("x", (replace(spine, per_1000_node_days=0.0),)))[0] == 1.0


def test_where_only_the_whole_cluster_fails_it_is_its_availability() -> None:
    """It fails every 2 days and is away for 6 hours: MTBF / (MTBF + MTTR), whatever the number of nodes."""
    storage = FailureModel("x", (Component("storage", 0.0, Scope.CLUSTER, 6 * 3600.0, per_1000_days=500.0),))
    free = Operation(2000, 0, 54 * DAY, (Tier("storage", Scope.CLUSTER, 1.0),), 0.0, 0.0)
    found, because = closed_form(free, storage)

    assert found == pytest.approx(48 / (48 + 6), abs=1e-4)
    assert because == "Daly, FGCS 2006; with spares for every failure, and the cluster's repairs waited for"


def test_intervals_are_whole_steps() -> None:
    operation = with_interval(operate(600.0), 100.0, step_seconds=30.0)

    assert operation.tiers[-1].every_seconds == 120.0


def test_the_formula_is_not_said_where_a_runs_end_counts() -> None:
    """Of 64 nodes one fails every 2.4 days: in 54 days intervals of 1.6 days are within the limit, of 1.7 not."""
    nodes = FailureModel("x", (Component("process", 6.5, Scope.PROCESS, 0.0),))
    inside, outside = (
        closed_form(Operation(64, 0, 54 * DAY, (Tier("storage", Scope.RACK, days * DAY),), 0.0, 300.0), nodes)
        for days in (1.59, 1.7)
    )
    assert inside[0] == pytest.approx(0.709, abs=0.005)
    assert inside[1] == "Daly, FGCS 2006; with spares for every failure"
    assert outside[0] is None
    assert outside[1] == (
        "the formula is of a run without end, which loses 35% of what it has not saved: here the last interval of "
        "1 d 17 h alone makes 0.6%"
    )
    never = closed_form(operate(1e9), NAMED["rsc-1"])
    assert never == (None, "the formula is of a run without end: here the run is over before its first save")
    assert closed_form(operate(3600.0), NAMED["rsc-1"])[0] == pytest.approx(0.720, abs=0.001)
    assert closed_form(operate(300.0), NAMED["rsc-1"])[0] == pytest.approx(0.934, abs=0.001)
    assert closed_form(operate(54 * DAY), NONE)[0] == 1.0


def test_the_best_interval_is_dalys_and_never_shorter_than_a_save() -> None:
    model = NAMED["rsc-1"]

    assert best_interval(operate(600.0, save=30.0), model, 1.0) == pytest.approx(math.sqrt(60 * 6646), rel=0.05)
    assert best_interval(operate(600.0), model, 45.0) == 45.0
    assert best_interval(operate(600.0), NONE, 45.0) == 54 * DAY


def test_mtbf_is_of_the_whole_run() -> None:
    assert mean_seconds_between(operate(600.0), NAMED["rsc-1"]) == pytest.approx(DAY / 13)
    assert math.isinf(mean_seconds_between(operate(600.0), NONE))


def test_spares_are_for_what_is_under_repair_at_once() -> None:
    days = FailureModel("x", (Component("node", 10.0, Scope.NODE, DAY), Component("p", 99.0, Scope.PROCESS, DAY)))
    racks = FailureModel("x", (Component("rack", 10.0, Scope.RACK, DAY),), rack_nodes=4)

    assert enough_spares(1000, days) == math.ceil(10 + 3.1 * math.sqrt(10))
    assert enough_spares(1000, racks) == math.ceil(40 + 3.1 * math.sqrt(160))
    assert enough_spares(1000, NONE) == 0
    wide = Component("spine", 10.0, Scope.ROW, DAY), Component("storage", 0.0, Scope.CLUSTER, DAY, per_1000_days=9.0)
    assert enough_spares(1000, FailureModel("x", wide)) == 0
