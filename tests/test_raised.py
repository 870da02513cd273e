"""How an error that has ended a worker reads; test_recorded.py has whole records."""

import pytest

from allranks.raised import render_raised


def told(error: BaseException) -> tuple[list[str], str]:
    with pytest.raises(type(error)) as caught:
        raise error
    text, line = render_raised(caught.value)
    return text.splitlines(), line


def test_what_was_raised_comes_last_and_notes_before_it() -> None:
    error = IndexError("index out of range in self")
    error.add_note("allranks: in a forward of samples 7")
    error.add_note("allranks: sample 7 asks for row 9")
    lines, line = told(error)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-3:] == [
        "allranks: in a forward of samples 7",
        "allranks: sample 7 asks for row 9",
        "IndexError: index out of range in self",
    ]
    assert line == "IndexError: index out of range in self"


def test_an_error_without_notes_and_of_several_lines() -> None:
    lines, line = told(ValueError("first\nsecond"))
    assert lines[-2:] == ["ValueError: first", "second"] and line == "second"
    lines, line = told(SyntaxError("no", ("task.py", 3, 1, "x =", 3, 4)))
    assert line == "SyntaxError: no" and lines[-1] == line


def test_its_cause_is_told_as_well() -> None:
    try:
        raise KeyError("a") from ZeroDivisionError("b")
    except KeyError as error:
        error.add_note("where")
        text, line = render_raised(error)
    assert "ZeroDivisionError: b" in text and text.endswith("where\nKeyError: 'a'\n") and line == "KeyError: 'a'"
