"""Names of a model's parts."""

from torch import nn

from allranks.profiling.structure import Structure, is_inside


def test_what_lies_in_what() -> None:
    assert is_inside("layers.1.attention", "layers.1")
    assert is_inside("layers.1", "layers.1")
    assert is_inside("layers.1", "")
    assert not is_inside("layers.10", "layers.1")
    assert not is_inside("layers", "layers.1")


def test_members_have_logical_names_and_come_once() -> None:
    shared = nn.Linear(2, 2)
    one = Structure("Words", {"": nn.Sequential(shared, nn.Sequential(shared))}, {})
    assert [name for name, _ in one.members()] == ["", "0", "1"]
    several = Structure("Gan", {"critic": nn.Sequential(nn.Linear(2, 2))}, {})
    assert [name for name, _ in several.members()] == ["critic", "critic.0"]


def test_activations_are_cut_along_the_sequence_where_the_plan_says_so() -> None:
    assert Structure("Words", {}, {}, styles={"norm": "sequence", "up": "colwise"}).sequence
    assert not Structure("Words", {}, {}, styles={"up": "colwise"}).sequence
