"""From the words of `allranks dryrun` to a printed Rehearsal and an exit code."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.output import print_error, print_json, stdout_kept_free, write_printed
from allranks.cli.rehearsed_question import Asked, choice_of, profile_of, question_of
from allranks.durable import check_target, write_whole
from allranks.rehearsal import Rehearsal

if TYPE_CHECKING:
    from allranks.rehearsing.whole import Question

FITS, NOT, UNKNOWN = 0, 1, 3


def answer(asked: Asked) -> int:
    """Rehearse, print, and say by the exit code whether it fits.

    Raises:
        AllranksError: what is asked is refused, or would be by training.
    """
    from allranks.rehearsing.refusals import Unrehearsable

    for path in (asked.svg, asked.trace):
        if path is not None:
            check_target(path)
    with stdout_kept_free(asked.json):
        question = question_of(asked)
        from allranks.rehearsing.whole import rehearse

        try:
            told = rehearse(question, lambda line: print(line, file=sys.stderr))
            if asked.remedies:
                from allranks.cli.remedies import find_remedies

                told = replace(told, remedies=tuple(find_remedies(asked, told)))
        except Unrehearsable as error:
            unknown: Unrehearsable | None = error
        else:
            unknown = None
    if unknown is not None:
        return print_error(unknown, json=asked.json, exit_code=UNKNOWN)
    if asked.json:
        print_json(told.to_json(timeline=asked.timeline))
    else:
        _print(asked, told)
    with stdout_kept_free(asked.json):
        refused = write_printed(lambda: _write(asked, question, told))
    return refused or exit_code(told)


def exit_code(told: Rehearsal) -> int:
    """0 fits; 1 does not, or would fail."""
    return FITS if told.fits and not told.fails else NOT


def _print(asked: Asked, told: Rehearsal) -> None:
    from allranks.reporting.rehearsal_text import render_moments, render_rehearsal

    print(render_rehearsal(told))
    for rank in told.ranks.values() if asked.timeline else ():
        print("\n" + render_moments(rank))


def _write(asked: Asked, question: "Question", told: Rehearsal) -> None:
    """The picture and the trace, as far as they are asked for."""
    _draw(asked, told)
    if asked.trace is not None:
        _write_trace(asked.trace, question, told)


def _write_trace(path: Path, question: "Question", told: Rehearsal) -> None:
    """The predicted step for Perfetto."""
    import json

    from allranks.planning.estimate import estimate
    from allranks.reporting.step_trace import make_trace

    predicted = estimate(profile_of(question), question.cluster, choice_of(question))
    write_whole(path, json.dumps(make_trace(told, predicted), allow_nan=False) + "\n")


def _draw(asked: Asked, told: Rehearsal) -> None:
    """The step of the first rank as a picture."""
    if asked.svg is not None:
        from allranks.reporting.rehearsal_text import draw_moments

        write_whole(asked.svg, draw_moments(next(iter(told.ranks.values()))))
