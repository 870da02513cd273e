"""Whatever the user's code raises in the command's process is one TaskError with the user's line."""

import sys
from pathlib import Path

import pytest

from allranks.errors import DataError, TaskError
from allranks.users_code import is_installed, user_place, users_code


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


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_line_of_an_installed_package_is_no_users(tmp_path: Path, folder: str) -> None:
    """Debian has its python's packages in dist-packages."""
    places = []
    for name in (folder, "mine"):
        file = tmp_path / name / "fails.py"
        file.parent.mkdir()
        try:
            exec(compile("1 / 0", file, "exec"), {})
        except ZeroDivisionError as error:
            places.append(user_place(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)))
    assert places == ["", "fails.py:1"]
    assert is_installed(tmp_path / folder / "fails.py") and not is_installed(tmp_path / f"my-{folder}")
