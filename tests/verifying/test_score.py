"""Outcomes of single programs, and their counts."""

from dataclasses import replace

import pytest

from allranks.verifying.score import Result, Score, by_kind, score

WRONG = Result("S08_means", "S8", "--nproc 2", 1, ("S8",), "means", 2.0, "right.py", "means of means.")
RIGHT = Result("right", "clean", "--nproc 2", 0, seconds=1.5)


@pytest.mark.parametrize(
    ("result", "outcome", "named_first", "named"),
    [
        (WRONG, "caught", True, True),
        (replace(WRONG, kinds=("S9", "S8")), "caught", False, True),
        (replace(WRONG, kinds=("S9",)), "caught", False, False),
        (replace(WRONG, exit_code=0, kinds=()), "missed", False, False),
        (replace(WRONG, exit_code=3, kinds=()), "not verified", False, False),
        (replace(WRONG, exit_code=2, kinds=(), refused_for_it=True), "refused", False, False),
        (replace(WRONG, exit_code=2, kinds=()), "not verified", False, False),
        (replace(WRONG, exit_code=78, kinds=(), refused_for_it=True), "not verified", False, False),
        (replace(WRONG, exit_code=1, kinds=()), "not verified", False, False),
        (replace(WRONG, exit_code=76, kinds=()), "not verified", False, False),
        (replace(WRONG, exit_code=78, kinds=()), "not verified", False, False),
        (replace(WRONG, exit_code=93, kinds=()), "not verified", False, False),
        (replace(WRONG, exit_code=None, run="", kinds=()), "unseen", False, False),
        (RIGHT, "clean", False, False),
        (replace(RIGHT, exit_code=1, kinds=("S8",)), "false alarm", False, False),
        (replace(RIGHT, exit_code=2), "false alarm", False, False),
        (replace(RIGHT, exit_code=3), "not verified", False, False),
        (replace(RIGHT, exit_code=1), "not verified", False, False),
        (replace(RIGHT, exit_code=78), "not verified", False, False),
    ],
)
def test_an_outcome(result: Result, outcome: str, named_first: bool, named: bool) -> None:
    assert (result.outcome, result.named_first, result.named) == (outcome, named_first, named)
    assert result.right == (outcome in ("caught", "refused", "clean", "unseen"))
    assert Result.from_json(result.to_json()) == result


def test_counts() -> None:
    missed = replace(WRONG, name="S08_other", exit_code=0, kinds=())
    other = replace(WRONG, name="S09_means", kind="S9", kinds=("S8", "S9"))
    refused = replace(WRONG, name="S10_a", kind="S10", exit_code=2, kinds=(), refused_for_it=True)
    otherwise = replace(refused, name="S10_b", refused_for_it=False)
    unseen = replace(WRONG, name="S39_a", kind="S39", exit_code=None, run="", seconds=0.0)
    accused = replace(RIGHT, name="left", exit_code=1, kinds=("S8",))
    unknown = replace(RIGHT, name="odd", exit_code=3)
    found = score([WRONG, missed, other, refused, otherwise, unseen, RIGHT, accused, unknown])
    assert found == Score(
        wrong=5, caught=3, refused=1, named_first=1, named=2, clean=3, false_alarms=1, unverified=2, unseen=1,
        kinds=3, kinds_caught=1, seconds=14.5,
    )  # fmt: skip
    assert not found.perfect


@pytest.mark.parametrize(
    "wrong",
    [replace(WRONG, exit_code=0), replace(RIGHT, exit_code=1, kinds=("S8",))]
    + [replace(WRONG, exit_code=code, kinds=()) for code in (1, 2, 3, 76, 78, 93)]
    + [replace(RIGHT, exit_code=code) for code in (1, 2, 3, 76)],
)
def test_perfect_is_all_caught_and_nobody_accused(wrong: Result) -> None:
    assert score([WRONG, RIGHT]).perfect and not score([WRONG, RIGHT, wrong]).perfect


def test_programs_are_sorted_by_number_and_the_clean_ones_last() -> None:
    names = [replace(WRONG, kind=kind, name=kind) for kind in ("clean", "S10", "S9", "S1")]
    assert [result.kind for result in sorted(names, key=by_kind)] == ["S1", "S9", "S10", "clean"]
