"""The user's code in the command's own process: what it raises is one TaskError, and never the command's answer.

`plan`, `verify` and `checkpoint import` answer by their exit code. `sys.exit()` in a dataset would say 0, "it fits" or
"equal", and a traceback's 1 "it does not" or "something differs".
"""

import contextlib
from collections.abc import Iterator

from allranks.errors import AllranksError, TaskError
from allranks.task_loading import user_line


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
