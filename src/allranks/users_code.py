"""The user's code: which lines are theirs, and what it raises in the command's own process.

That is one TaskError, and never the command's answer.

`plan`, `verify` and `checkpoint import` answer by their exit code. `sys.exit()` in a dataset would say 0, "it fits" or
"equal", and a traceback's 1 "it does not" or "something differs".
"""

import contextlib
import traceback
import typing
from collections.abc import Iterator
from pathlib import Path

from allranks.errors import AllranksError, TaskError

_PACKAGES = frozenset({"site-packages", "dist-packages"})  # the second is Debian's
_LIBRARY = (str(Path(__file__).parent), "<frozen", str(Path(typing.__file__).parent))


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Say `what`, and the user's own line, of what is raised inside; Ctrl-C and errors of ours go through.

    Raises:
        TaskError: something was, sys.exit() included.
    """
    try:
        yield
    except AllranksError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{what}:\n{user_line(error)}") from error


def user_line(error: BaseException) -> str:
    """The last line of the user's own code in the error's traceback, as Python prints it, then the error itself.

    Where none of it is the user's (a model of torch's own modules), the last few lines stand for it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if _is_users(frame.filename)]
    place = "".join(traceback.format_list(users[-1:] or frames[-3:]))
    return (place + "".join(traceback.format_exception_only(error))).rstrip()


def user_place(error: BaseException) -> str:
    """The same line's place alone, `file.py:12`; "" where none of it is the user's."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{Path(users[-1].filename).name}:{users[-1].lineno}" if users else ""


def is_installed(path: str | Path) -> bool:
    """Whether a file or folder belongs to an installed package."""
    return not _PACKAGES.isdisjoint(Path(path).parts)


def _is_users(filename: str) -> bool:
    return not is_installed(filename) and not filename.startswith(_LIBRARY)
