"""Where a model is cut into stages."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError, TaskError
from allranks.models.transformer import Transformer
from allranks.parallel.stage_plan import plan_stages


def transformer(num_layers: int) -> nn.Module:
    with torch.device("meta"):
        return Transformer(11, num_layers, 32, 4)


@pytest.mark.parametrize(
    ("num_stages", "points"),
    [
        (2, ("layers.3",)),
        (3, ("layers.2", "layers.4")),
        (6, tuple(f"layers.{i}" for i in range(1, 6))),
    ],
)
def test_equal_blocks_are_dealt_equally(num_stages: int, points: tuple[str, ...]) -> None:
    plan = plan_stages(transformer(6), range(num_stages))
    assert plan.points == points and plan.num_stages == num_stages
    assert plan.homes["embedding"] == plan.homes["layers.0"] == 0
    assert plan.homes["layers.5"] == plan.homes["norm"] == plan.homes["output"] == num_stages - 1
    assert plan.because == "these modules repeat"


def test_a_rank_of_two_stages_has_no_more_in_all_than_another() -> None:
    """With a small head the dearest stage alone would leave one rank of a V four of six blocks."""
    for ranks in ([0, 1, 1, 0], [0, 1, 0, 1]):
        homes = plan_stages(transformer(6), ranks).homes
        held = [ranks[homes[f"layers.{block}"]] for block in range(6)]
        assert held.count(0) == held.count(1) == 3


def test_a_heavy_head_gets_fewer_blocks_beside_it() -> None:
    with torch.device("meta"):
        model = Transformer(20_000, 4, 32, 4)
    # The embedding has as many parameters, but is looked up and not multiplied.
    assert plan_stages(model, range(2)).points == ("layers.3",)


def test_operations_weigh_where_they_are_counted() -> None:
    asked: list[list[str]] = []

    def count(module: nn.Module, names: Sequence[str]) -> list[float]:
        asked.append(list(names))
        return [0.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    plan = plan_stages(transformer(6), range(2), count=count)
    assert plan.points == ("layers.1",) and plan.balanced == "balanced by operations"
    assert asked == [[f"layers.{i}" for i in range(6)]]


def test_parameters_weigh_where_operations_are_not_counted() -> None:
    def count(module: nn.Module, names: Sequence[str]) -> list[float]:
        raise TaskError("it branches")

    uncounted = "balanced by parameters, as operations could not be counted: "
    plan = plan_stages(transformer(6), range(2), count=count)
    assert plan.points == ("layers.3",) and plan.balanced == f"{uncounted}it branches"
    assert plan_stages(transformer(6), range(2)).balanced == f"{uncounted}no sample was at hand"


def test_a_sequence_is_cut_between_its_modules() -> None:
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]
    plan = plan_stages(nn.Sequential(*layers), range(3))
    assert plan.points == ("2", "4")
    assert plan.homes == {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2}
    assert plan.because == "the model is a sequence of modules"


def test_hints_name_the_places() -> None:
    plan = plan_stages(transformer(4), range(2), split_before=["norm", "layers.1"])
    assert plan.points in (("layers.1",), ("norm",)) and plan.because == "hints().split_before names them"
    alone = plan_stages(transformer(4), range(2), split_before=["norm"])
    assert alone.points == ("norm",) and alone.homes["layers"] == 0 and alone.homes["output"] == 1
    assert plan_stages(transformer(4), range(2), blocks=["layers.*"]).because == "hints().blocks names them"


def test_a_pattern_names_the_outermost_of_its_matches() -> None:
    """A `*` matches dots, too: the parts of a layer are no places to cut."""
    asked: list[str] = []

    def count(module: nn.Module, names: Sequence[str]) -> list[float]:
        asked.extend(names)
        return [1.0] * (len(names) + 1)

    for pattern in ("layers.*", "layers*"):
        plan_stages(transformer(3), range(2), split_before=[pattern], count=count)
    assert asked == ["layers.0", "layers.1", "layers.2"] * 2
    plan = plan_stages(transformer(3), range(3), split_before=["layers.1", "layers.2.feed_forward"])
    assert plan.points == ("layers.1", "layers.2.feed_forward")


def test_what_lies_in_several_stages_has_no_home() -> None:
    plan = plan_stages(transformer(2), range(2))
    assert "layers" not in plan.homes and "layers.0" in plan.homes


def test_a_module_that_is_registered_twice_has_two_homes() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4), shared)
    plan = plan_stages(model, range(2), split_before=["3"])
    assert (plan.homes["0"], plan.homes["4"]) == (0, 1)


def test_too_few_blocks_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        LayoutError, match=r"3 stages begins at 3 blocks at least, and this model has 2 \(layers.0, layers.1\)"
    ):
        plan_stages(transformer(2), range(3))
    with pytest.raises(LayoutError, match=r"this model has 0 \(none repeats\)"):
        plan_stages(nn.Linear(2, 2), range(2))
    with pytest.raises(LayoutError, match=r"3 stages begins at 2 blocks at least, and this model has 1 \(norm\)"):
        plan_stages(transformer(2), range(3), split_before=["norm"])


def test_a_hint_that_matches_nothing_is_refused_with_names() -> None:
    with pytest.raises(
        LayoutError, match=r"hints\(\).split_before: 'layer.1' matches no module; the nearest are layers.1, "
    ):
        plan_stages(transformer(2), range(2), split_before=["layer.1"])
