"""What is gathered as one unit: found by structure, named by hints, joined where parameters are shared."""

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.parallel.blocks import find_blocks, group_units, search_blocks
from tests.distributed.tasks import MODELS


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 8)


def found(module: nn.Module, *patterns: str) -> list[str]:
    return find_blocks({"": module}, patterns)[""]


def test_the_outermost_repeated_modules_are_blocks() -> None:
    assert found(Language()) == ["layers.0", "layers.1", "layers.2"]


def test_equal_layers_of_a_plain_stack_are_blocks() -> None:
    stack = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    assert found(stack) == ["2", "4"]


def test_a_model_that_repeats_nothing_has_none() -> None:
    assert found(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))) == []
    assert found(nn.Linear(2, 2)) == []


def test_modules_without_parameters_are_no_blocks() -> None:
    assert found(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))) == []


def test_a_list_of_lists_is_searched_because_a_list_is_never_called() -> None:
    stages = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert found(stages) == ["0.0", "0.1", "1.0", "1.1"]


def test_blocks_of_other_shapes_or_types_are_told_apart() -> None:
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3), nn.Bilinear(2, 2, 2)])
    assert found(mixed) == ["0", "1"]


def test_hints_replace_the_search() -> None:
    assert found(Language(), "embedding", "head") == ["embedding", "head"]


def test_of_matches_inside_one_another_the_outermost_counts() -> None:
    """fnmatch's * matches dots too: "layers.*" would name every part of every layer."""
    assert found(Language(), "layers.*") == ["layers.0", "layers.1", "layers.2"]
    assert found(Language(), "layers*") == ["layers.0", "layers.1", "layers.2"]
    assert found(Language(), "*.experts.*") == [f"layers.{i}.experts.{j}" for i in range(3) for j in range(2)]


def test_a_hint_that_matches_nothing_names_what_there_is() -> None:
    with pytest.raises(LayoutError, match=r"'blocks\.\*' matches no module with parameters; the nearest are "):
        found(Language(), "blocks.*")
    with pytest.raises(LayoutError, match="'layers' matches no module"):
        found(Language(), "layers")


def test_a_layout_without_blocks_searches_where_a_hint_matches_nothing() -> None:
    assert search_blocks({"": Language()}, ("layer.*",)) == {"": ["layers.0", "layers.1", "layers.2"]}
    assert search_blocks({"": Language()}, ("layers.1",)) == {"": ["layers.1"]}


def test_hints_of_several_models_are_logical_names() -> None:
    models = {"generator": Language(), "critic": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}
    blocks = find_blocks(models, ["generator.layers.*"])
    assert blocks == {"generator": ["layers.0", "layers.1", "layers.2"], "critic": []}
    assert find_blocks(models)["critic"] == ["0", "1"]


def test_units_are_the_blocks_where_nothing_is_shared() -> None:
    model = Language()
    assert group_units(model, found(model)) == [("layers.0",), ("layers.1",), ("layers.2",)]


def test_blocks_that_share_a_parameter_become_one_unit() -> None:
    model = MODELS["sharing"]()
    assert group_units(model, found(model)) == [("blocks.0", "blocks.2"), ("blocks.1",)]


def test_sharing_in_a_chain_joins_all() -> None:
    model = Language()
    model.layers[2].attention.weight = model.layers[0].attention.weight  # type: ignore[union-attr]
    model.layers[1].experts[0].bias = model.layers[2].experts[1].bias  # type: ignore[union-attr,index]
    assert group_units(model, found(model)) == [("layers.0", "layers.1", "layers.2")]


def test_a_block_that_shares_with_the_rest_joins_the_root() -> None:
    model = Language()
    tied = nn.Parameter(torch.zeros(4))
    model.layers[1].attention.bias = model.tied = tied  # type: ignore[union-attr]
    assert group_units(model, found(model)) == [("layers.0",), ("layers.2",)]
    model.layers[2].attention.bias = tied  # type: ignore[union-attr]
    assert group_units(model, found(model)) == [("layers.0",)]


def test_a_shared_parameter_without_dims_binds_nothing() -> None:
    """It is never cut: one temperature in every block must not make one unit of the whole model."""
    model = MODELS["scalars"]()
    assert model.blocks[0].gain is model.blocks[2].gain  # type: ignore[union-attr,index]
    assert group_units(model, found(model)) == [("blocks.0",), ("blocks.1",), ("blocks.2",)]


def test_names_that_begin_alike_are_not_confused() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(11))
    model[10].weight = model[1].weight
    assert ("1", "10") in group_units(model, found(model))
    assert len(group_units(model, found(model))) == 10
