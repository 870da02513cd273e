"""One line for a wrong table: the key, the value as the file has it, its line, the nearest key."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from allranks.errors import ConfigError
from allranks.planning.wrong_keys import WrongKey, as_toml, naming, nearest_word, validate


class Box(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width_cm: int = Field(ge=1, strict=True)
    height_cm: int = 2
    sides: dict[int, list[tuple[int, int]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_possible(self) -> "Box":
        if self.height_cm > 9:
            raise ValueError(f"height_cm = {self.height_cm} is more than any box has")
        if self.height_cm == 0:
            raise ValueError("no box is flat")
        return self


@pytest.mark.parametrize(
    ("values", "where", "key", "message"),
    [
        ({"width_cm": 0}, "box", "box.width_cm", "box.width_cm = 0: give a whole number of at least 1"),
        ({"width_cm": "3"}, "", "width_cm", 'width_cm = "3": a whole number is expected'),
        ({"wdth_cm": 3}, "box", "box.wdth_cm", "unknown key 'box.wdth_cm'; did you mean 'width_cm'?"),
        ({}, "box", "box.width_cm", "box.width_cm is missing; say how wide"),
        ({"width_cm": 1, "height_cm": 12}, "box", "box.height_cm", "box.height_cm = 12 is more than any box has"),
        ({"width_cm": 1, "height_cm": 12}, "", "height_cm", "height_cm = 12 is more than any box has"),
        ({"width_cm": 1, "height_cm": 0}, "box", "box", "box: no box is flat"),
        ({"width_cm": 1, "sides": {1: [[2]]}}, "box", "box.sides.1.0.1", "box.sides.1.0 = [2]: too short a row"),
    ],
)
def test_one_line(values: dict[str, Any], where: str, key: str, message: str) -> None:
    with pytest.raises(WrongKey) as caught:
        validate(Box, values, where, missing="say how wide")
    assert (caught.value.key, str(caught.value)) == (key, message)


def test_an_unknown_key_is_told_before_the_one_that_it_should_have_been() -> None:
    with pytest.raises(WrongKey, match="unknown key 'widht_cm'; did you mean 'width_cm'"):
        validate(Box, {"widht_cm": 3}, "")


def test_what_is_right_is_the_value() -> None:
    assert validate(Box, {"width_cm": 3}, "box").width_cm == 3


def test_an_error_inside_is_about_its_key() -> None:
    with pytest.raises(WrongKey, match=r"^between: unknown fabric 'x'") as caught, naming("between"):
        raise ConfigError("unknown fabric 'x'")
    assert caught.value.key == "between"
    with pytest.raises(WrongKey, match=r"^already") as caught, naming("between"):
        raise WrongKey("known", "already")
    assert caught.value.key == "known"


@pytest.mark.parametrize(
    ("key", "line"),
    [("box.width_cm", " line 3"), ("width_cm", " line 1"), ("other.width_cm", " line 5"), ("box.lid", " line 2"),
     ("other.sides.1.0", " line 6"), ("lid", "")],
)  # fmt: skip
def test_the_line_of_the_key_or_of_its_table(key: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "boxes.toml"
    path.write_text("width_cm = 1\n[box]\nwidth_cm = 2\n[other]\nwidth_cm = 3\nsides = { 1 = [] }\n")
    assert WrongKey(key, "wrong").line(path) == line


def test_the_key_is_nearer_than_a_table_that_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "boxes.toml"
    path.write_text("[box.lid]\nwidth_cm = 1\n[box]\nheight_cm = 2\n")
    assert WrongKey("box.lid.width_cm", "wrong").line(path) == " line 2"


def test_words_with_underscores() -> None:
    assert nearest_word("memry_gb", ["memory_gb", "label"]) == "; did you mean 'memory_gb'?"
    assert nearest_word("zzz", ["memory_gb", "label"]) == "; there are label, memory_gb"


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), ("a", '"a"'), (Decimal("NaN"), "nan"), (Decimal("2.0"), "2.0"), (Decimal("8.0E+20"), "8.0e+20"),
     ([1, "b"], '[1, "b"]'), ({"a": 1}, "{ ... }"), (3, "3")],
)  # fmt: skip
def test_a_value_as_the_file_has_it(value: object, text: str) -> None:
    assert as_toml(value) == text
