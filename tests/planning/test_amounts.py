"""Numbers as people write them."""

import pytest

from allranks.errors import ConfigError
from allranks.planning.amounts import POSITIONS, TIMES, read_number


def test_a_suffix_multiplies() -> None:
    assert read_number("32k", POSITIONS, "--seq") == 32768
    assert read_number(" 1.5 H ", TIMES, "--deadline") == 5400
    assert read_number("1e3", {"": 1}, "--gpus") == 1000


@pytest.mark.parametrize("text", ["", "x", "-3", "3 x", "1e", "0"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match="not understood; write 30, 30k"):
        read_number(text, {"": 1, "k": 1e3}, "--seq")
