"""What `allranks dryrun` was asked, by its words: the Task, its config, the world, and what the planner knows of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from allranks.cli.planned_model import is_task
from allranks.cli.train import read_arguments
from allranks.errors import ConfigError
from allranks.request import TrainRequest

if TYPE_CHECKING:
    from allranks.model_profile import ModelProfile
    from allranks.plan import Choice
    from allranks.rehearsing.whole import Question

NAMED = "allranks.rehearsing.named:Named"


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
