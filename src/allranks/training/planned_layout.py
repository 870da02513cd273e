"""The layout of a run that names none, decided by a plan before anything starts.

What a plan needs of a model was kept by an earlier start, or is traced in a process of its own. A model whose state
obviously fits on every device trains by ddp unless another layout is predicted to be faster by more than predictions
err, and by ddp where nobody measured the processor; of any other model the fastest layout that fits is taken.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from allranks.cluster import Cluster
from allranks.config import Config, LayoutConfig, override_config
from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.plan import Choice, Plan, Ranked
from allranks.planning.answer import make_plan
from allranks.planning.corrections import explain
from allranks.planning.document import layout_table, plan_document
from allranks.planning.estimate import estimate
from allranks.planning.question import Question, choose_precisions
from allranks.planning.reasons import why_not
from allranks.profiling.known_tasks import KnownTask, find_known
from allranks.request import TrainRequest
from allranks.stepping.upkeep import upkeep_of
from allranks.task import has_optimizer
from allranks.training.counted_parameters import device_untouched
from allranks.training.like_this_machine import like_this_machine
from allranks.training.prepare import Prepared, prepare, resolve_layout
from allranks.training.sketch import Sketch, sketch_of, trace_known
from allranks.units import format_seconds
from allranks.verdict import Decision

WEIGHT_BYTES, STATE_BYTES = 4, 16
"""Of a parameter in float32: itself, and with its gradient and two averages of Adam's, the most that a built-in
optimizer keeps, where it is trained."""
OBVIOUS = 0.25
"""The share of a device's memory up to which a model's state leaves enough for whatever activations it has."""
FASTER = 0.05
"""Of its step time another layout must save before it takes ddp's place: measured layouts were predicted about so well
beside each other (docs/explanation/measured.md)."""
LONGEST = 60.0
"""Seconds that a start waits for the trace of a model that obviously fits, once its dataset is there."""
MODES = ("recompute", "offload")
DEFAULT = "layout ddp, the default"
Aside = Callable[..., Any]


@final
@dataclass(frozen=True)
class Decided:
    """What was decided for a run without a layout.

    Attributes:
        decisions: for the banner.
        overrides: `key.sub=value` of what the run's config takes from it; () leaves it ddp over whatever there is.
        document: plan.json; None where there is nothing to keep.
    """

    decisions: tuple[Decision, ...]
    overrides: tuple[str, ...] = ()
    document: dict[str, Any] | None = field(default=None)


def decide_layout(
    prepared: Prepared,
    request: TrainRequest,
    num_processes: int,
    aside: Aside,
    num_nodes: int = 1,
    *,
    here: bool = True,
    own_gpus: bool = False,
) -> Decided:
    """The layout for `num_processes`, of a new run of several whose config names none.

    Args:
        num_nodes: on as many machines like this one, each with the same number; between them is what the catalog
            joins such machines with, since nobody measured that.
        here: whether model() may run in this process; not in a rank, whose draws it would move on, and whose peers are
            not in it.
        own_gpus: whether each process is known to have a GPU of its own, also where this one sees fewer than there are.
        aside: calls "package.module:function" with arguments in a process of its own, as `call_aside` does. Here CUDA
            is not initialised, whose context would lie on a GPU for as long as the run lasts. It is waited for: who
            ended it would end the user's dataset in the middle of what that writes.
    """
    beside = _beyond_a_plan(prepared.config.layout)
    if beside:
        return _default(f"layout.{beside} is set, which a plan does not weigh")
    on_gpu = request.device != "cpu" and torch.cuda.device_count() > 0
    try:
        cluster, sketch = like_this_machine(on_gpu, num_processes, num_nodes, own_gpus), None
        with contextlib.suppress(Exception), _environment_kept(), device_untouched():
            sketch = sketch_of(prepared, cluster.device.kind) if here else None
        known = None if sketch is None else find_known(sketch.key)
        if known is not None and _answers(known, prepared, cluster):
            return _planned(prepared, cluster, known, small=_is_small(sketch, prepared.config, cluster))
        planned = aside(f"{__name__}:{plan_layout.__name__}", request, cluster)
        assert isinstance(planned, Decided)
        return planned
    except AllranksError as error:
        return unplanned(str(error))


def plan_layout(request: TrainRequest, cluster: Cluster) -> Decided:
    """The same in whatever process, from a trace where none is known: model() runs here as it is."""
    try:
        prepared, sketch = prepare(request), None
        with contextlib.suppress(Exception):
            sketch = sketch_of(prepared, cluster.device.kind)
        known = None if sketch is None else find_known(sketch.key)
        told: list[Decision] = []
        if known is None or not _answers(known, prepared, cluster):
            waits = LONGEST if sketch is None or _is_small(sketch, prepared.config, cluster) else None
            wanted = _precisions(prepared, cluster), cluster.device.kind
            known = trace_known(prepared, *wanted, sketch, told.append, within=waits)
        decided = _planned(prepared, cluster, known, small=_is_small(sketch, prepared.config, cluster))
        return replace(decided, decisions=(*told, *decided.decisions))
    except AllranksError as error:
        return unplanned(str(error))
    except Exception as error:
        # The user's code, in a trace. Where it is a real fault, the workers raise it again.
        line = next(iter(str(error).splitlines()), "")
        return unplanned(f"{type(error).__name__}: {line}")


def _precisions(prepared: Prepared, cluster: Cluster) -> tuple[str, ...]:
    return choose_precisions(prepared.config.train.precision, cluster)[0]


def _answers(known: KnownTask, prepared: Prepared, cluster: Cluster) -> bool:
    return bool(known.fault) or set(_precisions(prepared, cluster)) <= known.profiles.keys()


def _is_small(sketch: Sketch | None, config: Config, cluster: Cluster) -> bool:
    """Whether the state obviously fits, as the number of parameters says."""
    if sketch is None:
        return False
    state = WEIGHT_BYTES * (sketch.parameters - sketch.trained) + STATE_BYTES * sketch.trained
    state *= 2 if config.train.precision == "float64" else 1
    return state <= OBVIOUS * cluster.device.memory_bytes


def settle(prepared: Prepared, decided: Decided) -> Prepared:
    """With what was decided in the config, and the plan that stands in the Run directory."""
    config = override_config(prepared.config, decided.overrides) if decided.overrides else prepared.config
    return replace(prepared, config=config, plan=decided.document)


def _default(because: str) -> Decided:
    return Decided((Decision(DEFAULT, because),))


def unplanned(because: str) -> Decided:
    """ddp, since no plan could be made."""
    return _default(f"it could not be planned: {because}")


def _beyond_a_plan(layout: LayoutConfig) -> str:
    """The first key that the user set and that is no mode of the search; "" where there is none."""
    usual = LayoutConfig()
    names = (name for name in LayoutConfig.model_fields if name not in MODES)
    return next((name for name in names if getattr(layout, name) != getattr(usual, name)), "")


def _planned(prepared: Prepared, cluster: Cluster, known: KnownTask, *, small: bool) -> Decided:
    """From what is known of the model, by a search over every layout."""
    if known.fault:
        return unplanned(known.fault)
    config = prepared.config
    question = _question(prepared, cluster, known)
    plan = make_plan(question)
    kept = _keeping_ddp(plan, question, config) if small else None
    plan = kept or plan
    if plan.leading is None:
        why = plan.refusals[0].because if plan.refusals else "there is none"
        return _default(f"every layout is refused: {why}")
    fixed = question.space().micro_steps is not None
    overrides = () if kept else _overrides(plan.leading.estimate.choice, config, fixed, cluster.nodes)
    # What it refuses, it says before a start.
    resolve_layout(override_config(config, overrides), cluster.num_devices, cluster.nodes)
    told = [Decision(*explain(cluster))] if cluster.corrections else []
    decision = _explain(plan.leading, plan.best is not None)
    return Decided((*told, decision), overrides, {**plan_document(plan), "decided": list(overrides)})


def _question(prepared: Prepared, cluster: Cluster, known: KnownTask) -> Question:
    config, task, usual = prepared.config, prepared.task, LayoutConfig()
    device = "cpu" if cluster.device.name == "cpu" else "cuda"
    return Question(
        make_profile=lambda seq, precision: known.profiles[precision],
        cluster=cluster,
        global_batch=config.train.global_batch,
        precisions=_precisions(prepared, cluster),
        micro_batch=config.train.micro_batch,
        micro_steps=config.train.micro_steps or (1 if task.coupled else None),
        upkeep=upkeep_of(config, device, known, own_optimizer=has_optimizer(task)),
        modes={
            name: str(getattr(config.layout, name))
            for name in MODES
            if getattr(config.layout, name) != getattr(usual, name)
        },
    )


def _keeping_ddp(plan: Plan, question: Question, config: Config) -> Plan | None:
    """`plan` with ddp, as it runs where nothing is said, for its best; None where another layout is worth the change.

    Its batch is cut as the config says: with micro_batch unset, into one forward a step.
    """
    space, cluster, batch = question.space(), question.cluster, question.global_batch
    if plan.best is None:
        return None
    layout = Layout.resolve(config.layout, cluster.num_devices, cluster.nodes)
    size = config.train.micro_batch or -(-batch // (layout.dp * (space.micro_steps or 1)))
    precision = plan.best.estimate.choice.precision
    choice = Choice(layout, batch, size, precision, upkeep=question.upkeep)
    ddp, fastest = estimate(space.profiles[precision], cluster, choice), plan.best.estimate
    unmeasured = cluster.device.name == "cpu" and not cluster.device.measured
    guessed = unmeasured or cluster.nodes > 1
    seconds = fastest.step_seconds.expected
    if not ddp.fits or (not guessed and seconds < (1 - FASTER) * ddp.step_seconds.expected):
        return None
    if fastest.choice == choice:
        return plan
    if unmeasured:
        stays = "by figures that are a guess, until `allranks doctor --calibrate` has measured this machine"
    elif guessed:
        stays = "by a guess of what joins the hosts, which `allranks plan --cluster NxM:DEVICE@FABRIC --save` is told"
    else:
        stays = f"less than {FASTER:.0%} is no reason to leave it"
    because = (
        f"its step is predicted at {format_seconds(ddp.step_seconds.expected)}, and the fastest,"
        f" {fastest.choice.layout} by micro-batches of {fastest.choice.micro_batch}, at {format_seconds(seconds)}:"
        f" {stays}"
    )
    return replace(plan, best=Ranked(ddp, because), others=(Ranked(fastest, why_not(fastest, ddp)),), what_ifs=())


def _explain(leading: Ranked, fits: bool) -> Decision:
    choice = leading.estimate.choice
    because = leading.because if fits else f"nothing fits by the plan, and this comes closest: {leading.because}"
    return Decision(f"layout {choice.layout}, micro_batch {choice.micro_batch}", because)


def _overrides(choice: Choice, config: Config, fixed: bool, num_nodes: int) -> tuple[str, ...]:
    """The keys that mean `choice`; a data-parallel degree stays open, so that a resume may have other processes.

    Of several machines it is the one that spans them.
    """
    table = layout_table(choice.layout)
    for name in ("dp_shard", "dp_replicate") if num_nodes == 1 else ("dp_replicate", "dp_shard"):
        if name in table:
            table[name] = "*"
            break
    words = [f"layout.{name}={value}" for name, value in table.items()]
    if not fixed and config.train.micro_batch is None:
        words.append(f"train.micro_batch={choice.micro_batch}")
    return tuple(words)


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """What a trace sets in the environment (torch's compiler does) would restart the fork server."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
