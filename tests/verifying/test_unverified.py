"""What is raised, or lost, before there is anything to compare is an answer with exit code 3."""

import sys

import pytest

from allranks.errors import CheckpointError, LayoutError, MemoryShortError, ProcessError
from allranks.verifying.unverified import Unverified, failing, failing_here


@pytest.mark.parametrize(
    "error", [ValueError("bad"), ProcessError("rank 1 was killed"), CheckpointError("torn"), MemoryShortError("short")]
)
def test_what_ends_a_process_is_the_answer(error: Exception) -> None:
    with pytest.raises(Unverified) as caught, failing("a rank fails", "mend it"):
        raise error from RuntimeError("there")
    answer = caught.value.answer
    assert answer.exit_code == 3
    assert str(answer) == f"could not be verified: a rank fails\n  {error}\n  there\n  next: mend it"


def test_a_refusal_stays_one() -> None:
    with pytest.raises(LayoutError), failing("a rank fails", "mend it"):
        raise LayoutError("8 is no 9")
    with pytest.raises(LayoutError), failing_here("it fails", "mend it"):
        raise LayoutError("8 is no 9")


def test_the_users_line_is_told_of_what_is_raised_here() -> None:
    with pytest.raises(Unverified) as caught, failing_here("it fails", "mend it"):
        sys.exit(0)
    told = str(caught.value.answer)
    lines = [line for line in told.splitlines() if "^" not in line]  # which Python 3.13 draws, and 3.11 does not
    assert lines[0] == "could not be verified: it fails" and "sys.exit(0)\n  SystemExit: 0\n" in "\n".join(lines)
