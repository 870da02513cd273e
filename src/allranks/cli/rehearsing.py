"""From the words of `allranks dryrun` to a printed Rehearsal and an exit code."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from allranks.cli.output import print_error, print_json, stdout_kept_free
from allranks.cli.planned_model import is_task
from allranks.cli.train import read_arguments
from allranks.errors import ConfigError
from allranks.rehearsal import Rehearsal
from allranks.request import TrainRequest

if TYPE_CHECKING:
    from allranks.model_profile import ModelProfile
    from allranks.plan import Choice
    from allranks.rehearsing.whole import Question

NAMED = "allranks.rehearsing.named:Named"
FITS, NOT, UNKNOWN = 0, 1, 3


@final
@dataclass(frozen=True)
class Asked:
    """The options of `allranks dryrun`, as they were written."""

    arguments: tuple[str, ...]
    cluster: str
    layout: str | None = None
    ranks: str = "kinds"
    timeline: bool = False
    svg: Path | None = None
    trace: Path | None = None
    full: bool = False
    remedies: bool = False
    json: bool = False


def answer(asked: Asked) -> int:
    """Rehearse, print, and say by the exit code whether it fits.

    Raises:
        AllranksError: what is asked is refused, or would be by training.
    """
    from allranks.rehearsing.refusals import Unrehearsable

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
    _draw(asked, told)
    if asked.trace is not None:
        _write_trace(asked.trace, question, told)
    if asked.json:
        print_json(told.to_json(timeline=asked.timeline))
    else:
        _print(asked, told)
    return exit_code(told)


def exit_code(told: Rehearsal) -> int:
    """0 fits; 1 does not, or would fail."""
    return FITS if told.fits and not told.fails else NOT


def question_of(asked: Asked) -> "Question":
    """What is to be rehearsed; the config is read as `train` reads it. Raises ConfigError, LayoutError, TaskError."""
    from allranks.planning.hardware import find_cluster
    from allranks.training.prepare import prepare, resolve_layout

    cluster = find_cluster(asked.cluster)
    spec, toml, overrides = task_of(asked.arguments)
    prepared = prepare(TrainRequest(task_spec=spec, toml=toml, overrides=overrides, layout=asked.layout))
    layout = resolve_layout(prepared.config, cluster.num_devices, cluster.nodes)
    from allranks.rehearsing.refusals import refuse
    from allranks.rehearsing.whole import Question
    from allranks.rehearsing.world_of_ranks import choose_ranks

    refuse(layout, prepared.config.train.precision, cluster.device)
    name = asked.arguments[0] if spec == NAMED else prepared.name
    ranks = choose_ranks(asked.ranks, layout)
    return Question(name, prepared.task, prepared.config, cluster, layout, ranks, asked.full)


def task_of(words: tuple[str, ...]) -> tuple[str | None, Path | None, tuple[str, ...]]:
    """(spec, TOML file, overrides); a NAME is a Task that is made from the table of names."""
    if is_task(words):
        return read_arguments(words)
    from allranks.named_models import find_model

    find_model(words[0])
    wrong = [word for word in words[1:] if "=" not in word]
    if wrong:
        raise ConfigError(f"'{wrong[0]}' behind the model {words[0]}: write config keys there, as in task.seq=4096")
    return NAMED, None, (f"task.name={words[0].lower()}", *words[1:])


def _print(asked: Asked, told: Rehearsal) -> None:
    from allranks.reporting.rehearsal_text import render_moments, render_rehearsal

    print(render_rehearsal(told))
    for rank in told.ranks.values() if asked.timeline else ():
        print("\n" + render_moments(rank))


def _write_trace(path: Path, question: "Question", told: Rehearsal) -> None:
    """The predicted step for Perfetto."""
    import json

    from allranks.durable import write_whole
    from allranks.planning.estimate import estimate
    from allranks.reporting.step_trace import make_trace

    predicted = estimate(profile_of(question), question.cluster, choice_of(question))
    write_whole(path, json.dumps(make_trace(told, predicted), allow_nan=False) + "\n")


def profile_of(question: "Question") -> "ModelProfile":
    """What the planner knows of the model: by its sizes, or traced."""
    from allranks.rehearsing.named import Named
    from allranks.shape_operations import OWN
    from allranks.stepping.profile import trace_task

    precision = question.config.train.precision
    if isinstance(question.task, Named):
        return question.task.shape().profile(None, precision, OWN)
    return trace_task(question.task, precision, question.cluster.device.kind)


def choice_of(question: "Question") -> "Choice":
    """The configuration as the planner names it."""
    from allranks.data.cut import cut_step
    from allranks.plan import Choice

    train, layout = question.config.train, question.layout
    cut = cut_step(train, layout)
    micro_batch = -(-train.global_batch // (layout.dp * cut.num_micro_steps()))
    return Choice(layout, train.global_batch, micro_batch, train.precision)


def _draw(asked: Asked, told: Rehearsal) -> None:
    """The step of the first rank as a picture."""
    if asked.svg is not None:
        from allranks.durable import write_whole
        from allranks.reporting.rehearsal_text import draw_moments

        write_whole(asked.svg, draw_moments(next(iter(told.ranks.values()))))
