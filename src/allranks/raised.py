"""An error that has ended a worker, as its user reads it: from the user's own first line to the error, at the end."""

import traceback
from pathlib import Path


def render_raised(error: BaseException) -> tuple[str, str]:
    """The traceback, and the last line of the error itself.

    Notes come before the error, unlike Python's own order: the error is what has to be seen last, and what tools take.
    """
    shown = traceback.TracebackException.from_exception(without_our_frames(error))
    notes, shown.__notes__ = shown.__notes__ or [], None
    own, lines = list(shown.format_exception_only()), list(shown.format())
    text = "".join([*lines[: len(lines) - len(own)], *(f"{note}\n" for note in notes), *own])
    return text, "".join(own).strip().splitlines()[-1]


def without_our_frames(error: BaseException) -> BaseException:
    """Drop the frames above the worker's entry: they are the same for every error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _starts_workers(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _starts_workers(filename: str) -> bool:
    here = Path(__file__).parent
    return Path(filename) == here / "recorded.py" or Path(filename).parent == here / "surviving"
