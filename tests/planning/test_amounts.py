"""Numbers as people write them."""

import pytest

from allranks.errors import ConfigError
from allranks.planning.amounts import POSITIONS, TIMES, check_amount, read_number


def test_a_suffix_multiplies() -> None:
    assert read_number("32k", POSITIONS, "--seq") == 32768
    assert read_number(" 1.5 H ", TIMES, "--deadline") == 5400
    assert read_number("1e3", {"": 1}, "--gpus") == 1000


@pytest.mark.parametrize("text", ["", "x", "-3", "3 x", "1e", "0"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match="not understood; write 30, 30k"):
        read_number(text, {"": 1, "k": 1e3}, "--seq")


@pytest.mark.parametrize("text", ["1e400", "1e30", "2e15k"])
def test_what_no_run_has(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--tokens {text}: more than 1e\\+18"):
        read_number(text, {"": 1, "k": 1e3}, "--tokens")


@pytest.mark.parametrize("given", [-5.0, 0.0, float("nan"), float("inf"), -float("inf")])
def test_a_figure_is_positive_and_finite(given: float) -> None:
    with pytest.raises(ConfigError, match=f"--budget {given:g}: write a number above 0"):
        check_amount(given, "--budget")


def test_a_figure_has_a_limit() -> None:
    check_amount(None, "--watts")
    check_amount(700, "--watts", 1000)
    with pytest.raises(ConfigError, match="--watts 1001: more than 1000"):
        check_amount(1001, "--watts", 1000)
