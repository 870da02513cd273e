"""Whatever the user's code raises in the command's process is one TaskError with the user's line."""

import sys

import pytest

from allranks.errors import DataError, TaskError
from allranks.users_code import users_code


def test_what_is_raised_is_a_task_error_with_the_line() -> None:
    with (
        pytest.raises(TaskError, match=r"(?s)^Mine fails:\n.*test_users_code.py.*no file") as caught,
        users_code("Mine fails"),
    ):
        raise FileNotFoundError("no file")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_an_end_of_the_process_is_one_too() -> None:
    with pytest.raises(TaskError, match=r"(?s)^Mine fails:\n.*sys.exit\(0\)\nSystemExit: 0$"), users_code("Mine fails"):
        sys.exit(0)


@pytest.mark.parametrize("error", [DataError("too few"), KeyboardInterrupt()])
def test_errors_of_ours_and_ctrl_c_go_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, users_code("Mine fails"):
        raise error
    assert caught.value is error
