"""What `allranks dryrun` was asked, by its words: the Task, its config, the world, and what the planner knows of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

from allranks.cli.planned_model import is_task, refuse_sizes
from allranks.cli.train import read_arguments
from allranks.errors import ConfigError
from allranks.layout import Layout
from allranks.request import TrainRequest

if TYPE_CHECKING:
    from allranks.model_profile import ModelProfile
    from allranks.plan import Choice
    from allranks.rehearsing.whole import Question

NAMED = "allranks.rehearsing.named:Named"


@final
@dataclass(frozen=True)
class Asked:
    """The options of `allranks dryrun`, as they were written.

    Attributes:
        sizes: by the name of the option.
        gpus: so many devices of the cluster's kind, in its nodes; None: as many as it has.
    """

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
    sizes: Mapping[str, int] = field(default_factory=dict)
    gpus: int | None = None


def question_of(asked: Asked) -> "Question":
    """What is to be rehearsed; the config is read as `train` reads it. Raises ConfigError, LayoutError, TaskError."""
    from allranks.planning.hardware import find_cluster
    from allranks.planning.scale import cluster_of
    from allranks.training.prepare import prepare, resolve_layout

    cluster = find_cluster(asked.cluster)
    if asked.gpus is not None:
        cluster = cluster_of(cluster, asked.gpus)
    spec, toml, overrides = task_of(asked.arguments, asked.sizes)
    prepared = prepare(TrainRequest(task_spec=spec, toml=toml, overrides=overrides, layout=asked.layout))
    from allranks.rehearsing.named import Named
    from allranks.rehearsing.refusals import refuse, refuse_stages
    from allranks.rehearsing.whole import Question
    from allranks.rehearsing.world_of_ranks import KINDS, choose_ranks

    refuse(prepared.config.layout, prepared.config.train.precision, cluster.device)
    task = prepared.task
    if isinstance(task, Named):  # its blocks are known, and no batch would help where they are too few
        refuse_stages(task.shape(), Layout.resolve(prepared.config.layout, cluster.num_devices, cluster.nodes))
    layout = resolve_layout(prepared.config, cluster.num_devices, cluster.nodes)
    name = task.shape().name if isinstance(task, Named) else prepared.name
    of_a_user = not isinstance(task, Named)
    ranks = choose_ranks(asked.ranks, layout, of_a_user=of_a_user)
    follow = of_a_user and asked.ranks == KINDS
    return Question(name, task, prepared.config, cluster, layout, ranks, asked.full, follow)


def task_of(
    words: tuple[str, ...], sizes: Mapping[str, int] | None = None
) -> tuple[str | None, Path | None, tuple[str, ...]]:
    """(spec, TOML file, overrides); a NAME, a config.json and sizes are a Task that is made of them."""
    changes = dict(sizes or {})
    # Sizes alone stand before no name: what is there are config keys.
    name, keys = (words[0], words[1:]) if words and not (changes and "=" in words[0]) else ("", words)
    if name and is_task(words):
        refuse_sizes(name, changes)
        return read_arguments(words)
    from allranks.named_models import find_shape

    named = find_shape(name, **changes)
    wrong = [word for word in keys if "=" not in word]
    if wrong:
        raise ConfigError(f"'{wrong[0]}' behind the model {named.name}: write config keys there, as in task.seq=4096")
    own = name if name.endswith(".json") else name.lower()
    return NAMED, None, (f"task.name={own}", *(f"task.{key}={value}" for key, value in changes.items()), *keys)


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
