"""The layers below a Config: what each place gives, with where it stood."""

from pathlib import Path

import pytest

from allranks.config_layers import Given, merge_layers, read_kept, read_mapping, read_overrides, read_toml_layer
from allranks.errors import ConfigError


def values(layer: dict[str, Given]) -> dict[str, object]:
    return {name: given.value for name, given in layer.items()}


def test_nested_tables_and_full_keys_are_the_same() -> None:
    assert read_mapping({"train": {"steps": 3}}, "here") == read_mapping({"train.steps": 3}, "here")
    assert read_mapping({"task": {"a": {"b": 1}}}, "here") == {"task.a": Given({"b": 1}, "here")}


def test_the_value_of_an_argument_is_toml_where_it_can_be_and_text_else() -> None:
    arguments = [
        "task.a=1",
        "task.b=1.5",
        "task.c=[1, 2]",
        "task.d=x y",
        "task.e='1'",
        "task.f=007",
        "task.g=",
        "task.h=1 = 2",
        f"task.i={'[' * 5000}",
        f"task.j={'1' * 5000}",
    ]
    kept = [1, 1.5, [1, 2], "x y", "1", "007", "", "1 = 2", "[" * 5000, "1" * 5000]
    assert list(values(read_overrides(arguments)).values()) == kept


def test_every_argument_is_the_origin_of_its_value() -> None:
    layer = read_overrides(["train.seed=1", "train.steps=2"], "tp=2")
    assert layer["train.steps"].place("train.steps") == "argument 'train.steps=2'"
    assert layer["layout.tp"].place("layout.tp") == "--layout"


def test_the_layout_option_beats_the_layout_argument() -> None:
    assert values(read_overrides(["layout=tp=2,pp=2"], "tp=4"))["layout.tp"] == 4
    assert values(read_overrides(["layout=tp=2,pp=2"], "tp=4"))["layout.pp"] == 1


def test_a_bad_layout_says_where_it_stood() -> None:
    with pytest.raises(ConfigError) as caught:
        read_overrides([], "tp=0")
    assert str(caught.value) == ("--layout: layout 'tp=0': tp=0, expected a whole number of at least 1 or '*'")


def test_the_line_of_a_file_is_part_of_the_place(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("\n[train]\nseed = 1\n")
    assert read_toml_layer(toml)["train.seed"].place("train.seed") == f"{toml} line 3"


def test_later_layers_win_and_lengths_displace_each_other() -> None:
    low, high = (
        read_kept({"train.steps": 3, "train.seed": 1, "train.max_norm": None}, "low"),
        read_overrides(["train.epochs=2"]),
    )
    assert values(merge_layers([low, high])) == {"train.seed": 1, "train.epochs": 2}
    assert values(merge_layers([high, low])) == {"train.seed": 1, "train.steps": 3}
