"""Runs that fail, on histories written by hand, so that every second can be counted."""

from typing import Any

import numpy as np
import pytest

from allranks.rehearsing.histories import BINS, Histories
from allranks.rehearsing.lanes import Lanes
from allranks.simulation import CAUSES, Operation, Scope, Tier

END = 10_000.0
STORAGE = Tier("storage", Scope.CLUSTER, every_seconds=100.0, load_seconds=5.0)


def history(*events: tuple[float, Scope, int, float], nodes: int = 4, slow: float = 0.0) -> Histories:
    """One run: (when, what it takes, which node, seconds until it is back), and slow seconds spread over all time."""
    rows = [*events, (np.inf, Scope.PROCESS, 0, 0.0)]
    times, scopes, places, repairs = (np.array([column]) for column in zip(*rows, strict=True))
    shares = (places + 0.5) / nodes
    return Histories(nodes, END, times, scopes.astype(int), shares, repairs, np.linspace(0, slow, BINS + 1)[None])


def live(found: Histories, **changes: Any) -> Lanes:
    """A run of 4 nodes that is known to have failed after 10 s and trains again 20 s later, without the reading."""
    usual = {
        "nodes": 4,
        "spares": 0,
        "seconds": END,
        "tiers": (STORAGE,),
        "detect_seconds": 10.0,
        "restart_seconds": 20.0,
    }
    lanes = Lanes([Operation(**{**usual, **changes})], found, rack_nodes=2, row_nodes=3, slowdown=0.25)
    lanes.live()
    assert sum(lanes.spent[cause][0] for cause in CAUSES) == pytest.approx(END)
    return lanes


def spent(lanes: Lanes) -> dict[str, float]:
    """What is not nothing, besides the training."""
    return {cause: float(lanes.spent[cause][0]) for cause in CAUSES[1:] if abs(lanes.spent[cause][0]) > 1e-9}


def test_without_failures_all_time_is_training() -> None:
    assert spent(live(history())) == {}


def test_a_failed_process_loses_what_came_after_the_last_checkpoint() -> None:
    lanes = live(history((250.0, Scope.PROCESS, 0, 0.0)))

    assert spent(lanes) == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 25.0})
    assert lanes.interruptions[0] == 1


def test_a_failure_during_the_restart_begins_it_again() -> None:
    lanes = live(history((250.0, Scope.PROCESS, 0, 0.0), (265.0, Scope.PROCESS, 0, 0.0)))

    assert spent(lanes) == pytest.approx({"redone": 50.0, "detecting": 20.0, "restarting": 30.0})


def test_a_checkpoint_that_is_still_being_written_does_not_count() -> None:
    slow = Tier("storage", Scope.RACK, every_seconds=100.0, lag_seconds=60.0)

    assert spent(live(history((250.0, Scope.PROCESS, 0, 0.0)), tiers=(slow,)))["redone"] == pytest.approx(150.0)
    assert spent(live(history((261.0, Scope.PROCESS, 0, 0.0)), tiers=(slow,)))["redone"] == pytest.approx(61.0)


def test_a_save_stops_training_for_its_share() -> None:
    lanes = live(history(), tiers=(Tier("storage", Scope.RACK, every_seconds=100.0, stall_seconds=25.0),))

    assert spent(lanes) == pytest.approx({"saving": END / 5})


def test_a_save_waits_for_the_one_before_to_be_written() -> None:
    """Every 100 s of training one that takes 400 s: training for a quarter of the time."""
    slow = Tier("storage", Scope.RACK, every_seconds=100.0, stall_seconds=25.0, lag_seconds=400.0)
    assert slow.stopped_seconds == 300.0
    assert spent(live(history(), tiers=(slow,))) == pytest.approx({"saving": END * 3 / 4})
    assert Tier("storage", Scope.RACK, 100.0, 25.0, 100.0).stopped_seconds == 25.0


def test_a_spare_takes_the_place_of_a_lost_node_and_without_one_the_run_waits() -> None:
    lost = history((250.0, Scope.NODE, 0, 1000.0), nodes=5)

    assert "waiting" not in spent(live(lost, spares=1))
    # Down until 285 anyway; the node is back at 1250, and then the run starts again.
    assert spent(live(lost)) == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 50.0, "waiting": 965.0})


def test_an_elastic_run_goes_on_smaller_and_takes_the_node_in_without_loss() -> None:
    found = spent(live(history((250.0, Scope.NODE, 0, 1000.0)), elastic_nodes=2, join_seconds=30.0))

    # 285 to 1250 with 2 of 4 nodes.
    assert found == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 55.0, "shrunk": 965.0 / 2})


def test_an_elastic_run_waits_where_not_one_replica_is_left() -> None:
    found = spent(live(history((250.0, Scope.RACK, 0, 1000.0)), elastic_nodes=3))

    assert found["waiting"] == pytest.approx(965.0)
    assert "shrunk" not in found


def test_a_rack_takes_more_nodes_than_one_spare_replaces() -> None:
    found = spent(live(history((250.0, Scope.RACK, 0, 1000.0), nodes=5), spares=1))

    assert found["waiting"] == pytest.approx(965.0)


def test_a_failed_spare_interrupts_nothing_but_is_missing_later() -> None:
    found = live(history((100.0, Scope.NODE, 4, 2000.0), (250.0, Scope.NODE, 0, 500.0), nodes=5), spares=1)

    assert found.interruptions[0] == 1
    assert spent(found)["waiting"] == pytest.approx(750.0 - 285.0)


def test_a_rack_that_begins_in_a_spare_takes_running_nodes_too() -> None:
    """One spare and a rack of two: one of the two is the run's, which waits for it and loses what came after a save."""
    found = live(history((250.0, Scope.RACK, 4, 1000.0), nodes=5), spares=1)

    assert found.interruptions[0] == 1
    assert spent(found) == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 50.0, "waiting": 965.0})


def test_a_rack_of_spares_alone_interrupts_nothing() -> None:
    found = live(history((100.0, Scope.RACK, 4, 2000.0), (250.0, Scope.NODE, 0, 500.0), nodes=6), spares=2)

    assert found.interruptions[0] == 1  # the node's, which has no spare then
    assert spent(found)["waiting"] == pytest.approx(750.0 - 285.0)


def test_a_row_takes_more_nodes_than_a_rack() -> None:
    """Three here: two spares do not replace them, three do."""
    few = live(history((250.0, Scope.ROW, 0, 1000.0), nodes=6), spares=2)
    enough = live(history((250.0, Scope.ROW, 0, 1000.0), nodes=7), spares=3)

    assert spent(few) == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 50.0, "waiting": 965.0})
    assert spent(enough) == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 25.0})


def test_an_elastic_run_goes_on_with_what_a_row_leaves() -> None:
    found = spent(live(history((250.0, Scope.ROW, 0, 1000.0)), elastic_nodes=1, join_seconds=30.0))

    # 285 to 1250 with 1 of 4 nodes.
    assert found == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 55.0, "shrunk": 965.0 * 3 / 4})


def test_the_whole_cluster_takes_its_spares_too_and_meanwhile_nothing_else_fails() -> None:
    events = (250.0, Scope.CLUSTER, 0, 1000.0), (600.0, Scope.PROCESS, 0, 0.0), (700.0, Scope.CLUSTER, 0, 5000.0)
    lanes = live(history(*events, nodes=14), spares=10, elastic_nodes=1)

    assert lanes.interruptions[0] == 1
    assert spent(lanes) == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 50.0, "waiting": 965.0})


def test_a_repair_of_the_whole_cluster_that_is_short_delays_nothing() -> None:
    found = spent(live(history((250.0, Scope.CLUSTER, 0, 30.0))))

    assert found == pytest.approx({"redone": 50.0, "detecting": 10.0, "restarting": 25.0})


def test_a_node_under_repair_stays_so_when_the_rest_of_the_cluster_is_back() -> None:
    """The node fails at 100 and its spare takes over until 2100; the cluster is away from 250 to 750."""
    found = live(history((100.0, Scope.NODE, 0, 2000.0), (250.0, Scope.CLUSTER, 0, 500.0), nodes=5), spares=1)

    # Up at 135 and then at 775; 115 s of training, of which 100 were saved.
    assert spent(found) == pytest.approx({"redone": 15.0, "detecting": 20.0, "restarting": 75.0, "waiting": 465.0})
    assert found.out[0] == 1  # nobody has looked for it since


def test_a_node_that_is_back_is_a_spare_again() -> None:
    found = live(history((100.0, Scope.NODE, 4, 50.0), (250.0, Scope.NODE, 0, 500.0), nodes=5), spares=1)

    assert "waiting" not in spent(found)


def test_a_peers_memory_survives_a_node_and_not_a_rack() -> None:
    tiers = (Tier("peer", Scope.NODE, every_seconds=10.0, load_seconds=1.0), STORAGE)
    node = spent(live(history((255.0, Scope.NODE, 0, 1.0), nodes=5), tiers=tiers, spares=2))
    wider = (
        spent(live(history((255.0, scope, 0, 1.0), nodes=7), tiers=tiers, spares=3))
        for scope in (Scope.RACK, Scope.ROW, Scope.CLUSTER)
    )

    assert node == pytest.approx({"redone": 5.0, "detecting": 10.0, "restarting": 21.0})
    for found in wider:
        assert found == pytest.approx({"redone": 55.0, "detecting": 10.0, "restarting": 25.0})


def test_a_tier_that_was_lost_holds_what_was_read_back() -> None:
    """The second failure, of a process right after the first, finds in memory what the first one read from storage."""
    tiers = (Tier("peer", Scope.NODE, every_seconds=10.0, load_seconds=1.0), STORAGE)
    events = (255.0, Scope.RACK, 0, 1.0), (295.0, Scope.PROCESS, 0, 0.0)
    found = spent(live(history(*events, nodes=6), tiers=tiers, spares=2))

    # Back at 290 with the work of 200; 5 s of work are lost again, from 200 on.
    assert found["redone"] == pytest.approx(55.0 + 5.0)


def test_slow_nodes_cost_their_share_of_the_time_in_which_one_is() -> None:
    assert spent(live(history(slow=5000.0))) == pytest.approx({"stragglers": 5000.0 * 0.2})


def test_many_repairs_at_once_are_all_remembered() -> None:
    events = [(100.0 + place, Scope.NODE, 0, 5000.0 + place) for place in range(40)]
    lanes = live(history(*events, nodes=44), spares=40)

    assert lanes.out[0] == 40
    assert "waiting" not in spent(lanes)


def test_operations_side_by_side_do_not_touch_each_other() -> None:
    found = history((250.0, Scope.NODE, 0, 1000.0), nodes=5)
    operations = [Operation(4, spares, END, (STORAGE,), 10.0, 20.0) for spares in (0, 1)]
    lanes = Lanes(operations, found, rack_nodes=2, row_nodes=3, slowdown=0.1)
    lanes.live()

    assert lanes.spent["waiting"].tolist() == pytest.approx([965.0, 0.0])
