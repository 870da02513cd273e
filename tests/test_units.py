"""Numbers for people, above all where a rounding reaches the next unit."""

import re

import pytest

from allranks.units import format_bytes, format_count, format_moment, format_seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.5, "1.0 kB"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_230_000_000, "1.2 GB"),
        (5e21, "5000.0 EB"),
        (-2_500, "-2.5 kB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("number", "text"), [(7, "7"), (12_345, "12.3k"), (7e9, "7.0B"), (1.5e12, "1.5T")])
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (85e-6, "85 us"),
        (999.6e-6, "1.0 ms"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.0 s"),
        (4.2, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (86_399, "1 d 00 h"),
        (3 * 86_400 + 4 * 3600, "3 d 04 h"),
        (100 * 86_400, "100 d 00 h"),
        (-2, "-2.0 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_moment_is_a_date_and_what_is_none_is_said() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", format_moment(1.7e9))
    assert {format_moment(value) for value in (float("nan"), float("inf"), -1e300, 1e300)} == {"an unknown time"}
