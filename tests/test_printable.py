"""What a terminal would obey is shown, not sent to it."""

from allranks.printable import printable, printable_lines


def test_a_terminal_obeys_nothing() -> None:
    assert printable("a\x1b[2J\n\tb \u202e ü") == r"a\x1b[2J\n\tb \u202e ü"


def test_lines_and_tabs_stay() -> None:
    assert printable_lines("a\x1b]0;t\x07\n\tb\r\n") == "a\\x1b]0;t\\x07\n\tb\\r\n"
