"""Ranges of positions: read and written, looked up, joined, and refused in words."""

import pytest

from allranks.left_out import LeftOut

SOME = LeftOut(((10, 20), (20, 30), (50, 60)))


def test_what_is_written_is_read() -> None:
    assert LeftOut.parse(" 10:20, 20:30,50:60 ,") == SOME
    assert LeftOut.parse(str(SOME)) == SOME and str(LeftOut()) == "" and LeftOut.parse("") == LeftOut()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10", "'10' is no range of positions: expected FIRST:PAST, such as 64:96"),
        ("-3:5", "no range"),
        ("10:10", "10:10 holds no position"),
        ("50:60,10:20", "10:20 begins before position 60"),
        ("10:20,15:30", "15:30 begins before position 20"),
    ],
)
def test_bad_ranges_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LeftOut.parse(text)


def test_where_it_goes_on_and_how_many_went() -> None:
    assert [SOME.beyond(p) for p in (0, 9, 10, 19, 20, 29, 30, 55)] == [0, 9, 30, 30, 30, 30, 30, 60]
    assert [SOME.before(p) for p in (0, 10, 15, 30, 50, 51, 99)] == [0, 0, 5, 20, 20, 21, 30]
    assert [SOME.next_after(p) for p in (0, 10, 30, 51)] == [10, 10, 50, None]


def test_ranges_begin_where_steps_do() -> None:
    assert SOME.misplaced(0, 10) is None and SOME.misplaced(0, 5) is None
    assert SOME.misplaced(0, 4) == 10 and SOME.misplaced(30, 15) == 50
    assert SOME.misplaced(55, 7) is None, "what lies behind is no concern"


def test_a_range_more() -> None:
    assert LeftOut().and_also(10, 20) == LeftOut(((10, 20),))
    assert LeftOut(((10, 20),)).and_also(20, 30).ranges == ((10, 20), (20, 30)), "each counts"
    assert SOME.and_also(5, 25).ranges == ((5, 20), (20, 30), (50, 60))
    assert SOME.and_also(25, 55).ranges == ((10, 20), (20, 30), (30, 60))
    assert SOME.and_also(30, 50).ranges == ((10, 20), (20, 30), (30, 50), (50, 60))
    assert SOME.and_also(0, 99).ranges == ((0, 20), (20, 30), (30, 60), (60, 99)), "one more than there were"


def test_whether_others_are_left_out_too() -> None:
    for text, covered in (("", True), ("12:28", True), ("10:20,50:60", True), ("12:31", False), ("0:5", False)):
        assert SOME.covers(LeftOut.parse(text)) is covered, text
