"""TOML with one clear line on error, and text that reads back as the same values."""

import datetime
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config_toml import find_line, read_toml, render_toml
from allranks.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@given(tables=st.dictionaries(TEXT, st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), max_size=3))
def test_what_is_rendered_reads_back(
    tables: dict[str, dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("toml") / "x.toml"
    path.write_text(render_toml(tables), encoding="utf-8", newline="")
    assert read_toml(path) == tables


def test_none_is_left_out_wherever_it_stands() -> None:
    tables: dict[str, dict[str, object]] = {
        "a": {"x": None, "y": [1, None], "z": {"u": None, "v": (2,)}},
        "b": {"x": None},
    }
    assert render_toml(tables) == "[a]\ny = [\n    1,\n]\n\n[a.z]\nv = [\n    2,\n]\n"


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^a setting cannot be written to TOML: .*use text, numbers, lists or tables$"
    ):
        render_toml({"task": {"x": object()}})
    assert render_toml({"task": {"day": datetime.date(2024, 2, 3)}}) == "[task]\nday = 2024-02-03\n"


@pytest.mark.parametrize(
    ("text", "parse_float"),
    [("a = " + "[" * 5000, float), ("a = " + "1" * 5000, float), ("a = 1e9999999999999999999", Decimal)],
)
def test_what_nothing_can_hold_is_refused(tmp_path: Path, text: str, parse_float: Callable[[str], Any]) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.toml.*: not valid TOML: "):
        read_toml(tmp_path / "x.toml", parse_float=parse_float)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.toml")
    with pytest.raises(ConfigError, match=r"x\.toml: cannot be read: no ordinary file"):
        read_toml(tmp_path / "x.toml")


def test_the_line_of_a_key_is_told_only_where_it_is_certain(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("# steps = 9\n[train]\n  steps=3\nmy_steps = 4\n[a]\nseed = 1\n[b]\ntrain.seed = 2\n")
    assert find_line(path, "steps") == " line 3"
    assert find_line(path, "seed") == ""
    assert find_line(path, "absent") == ""
