"""The nouns of a simulation."""

import pytest

from allranks.simulation import CAUSES, DAY, Component, FailureModel, Scope


def test_a_wider_scope_is_more() -> None:
    assert Scope.PROCESS < Scope.NODE < Scope.RACK < Scope.ROW < Scope.CLUSTER


def test_the_rate_of_a_model_is_that_of_all_its_components() -> None:
    parts = (Component("a", 1.5, Scope.NODE, 1.0), Component("b", 0.25, Scope.RACK, 1.0))

    assert FailureModel("x", parts).per_1000_node_days == 1.75


def test_what_takes_the_whole_cluster_comes_as_often_on_many_nodes_as_on_few() -> None:
    model = FailureModel("x", (Component("a", 2.0, Scope.NODE, 1.0), Component("b", 0.0, Scope.CLUSTER, 1.0, 30.0)))

    assert (model.per_1000_node_days, model.per_1000_days) == (2.0, 30.0)
    assert [model.per_second(nodes) * 1000 * DAY for nodes in (1, 1000)] == pytest.approx([32.0, 2030.0])


def test_every_cause_has_one_name() -> None:
    assert len(set(CAUSES)) == len(CAUSES) == 8
