"""The nouns of a simulation."""

from allranks.simulation import CAUSES, Component, FailureModel, Scope


def test_a_wider_scope_is_more() -> None:
    assert Scope.PROCESS < Scope.NODE < Scope.RACK


def test_the_rate_of_a_model_is_that_of_all_its_components() -> None:
    parts = (Component("a", 1.5, Scope.NODE, 1.0), Component("b", 0.25, Scope.RACK, 1.0))

    assert FailureModel("x", parts).per_1000_node_days == 1.75


def test_every_cause_has_one_name() -> None:
    assert len(set(CAUSES)) == len(CAUSES) == 8
