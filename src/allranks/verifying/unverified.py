"""What ends a verification before there is anything to compare: an exception that carries the answer."""

import contextlib
from collections.abc import Iterator
from typing import final

from allranks.errors import AllranksError
from allranks.users_code import user_line
from allranks.verifying.answer import Answer, cannot


@final
class Unverified(Exception):
    """It could not be verified.

    Attributes:
        answer: which says why.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


@contextlib.contextmanager
def failing(what: str, advice: str) -> Iterator[None]:
    """Around `launch`: what is raised in its processes, or ends one of them, is that answer.

    A refusal stays one: what was asked is wrong. Its exit code is 2; those of the other errors mean nothing here.

    Raises:
        Unverified: something was raised, or a process was lost (a signal, sys.exit, os._exit).
    """
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        if isinstance(error, AllranksError) and error.exit_code == AllranksError.exit_code:
            raise
        told = f"{error}\n{error.__cause__ or ''}".strip()
        raise Unverified(cannot(what, told, advice)) from error


@contextlib.contextmanager
def failing_here(what: str, advice: str) -> Iterator[None]:
    """The same around the user's code in this very process, which may call sys.exit().

    Raises:
        Unverified: something was raised. Errors of ours go through.
    """
    try:
        yield
    except (AllranksError, Unverified):
        raise
    except (Exception, SystemExit) as error:
        raise Unverified(cannot(what, user_line(error), advice)) from error
