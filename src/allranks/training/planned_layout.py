"""The layout of a run that names none, decided before anything starts, in a moment where that is enough.

A model whose state obviously fits on every device trains by data parallelism: counting its parameters says so, without
a trace, and without memory. Only where the state takes a noticeable part of a device, or where model() needs a device
to be built, is the model traced and every layout weighed, which takes seconds and a process of its own.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

import torch

from allranks.cluster import Cluster
from allranks.config import Config, LayoutConfig, override_config
from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Ranked
from allranks.planning.hardware import find_cluster
from allranks.planning.this_machine import cpu_cluster
from allranks.request import TrainRequest
from allranks.training.counted_parameters import count_parameters, device_untouched
from allranks.training.prepare import Prepared, prepare, resolve_layout
from allranks.units import format_bytes, format_count
from allranks.verdict import Decision

STATE_BYTES = 16
"""Of a parameter in float32: weight, gradient and two averages of Adam's, the most that a built-in optimizer keeps."""
OBVIOUS = 0.25
"""The share of a device's memory up to which a model's state leaves enough for whatever activations it has."""
MODES = ("recompute", "offload")
DEFAULT = "layout ddp, the default"
Aside = Callable[..., Any]
UNKNOWN: Final = "unknown"
LARGE: Final = "large"


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


def decide_layout(prepared: Prepared, request: TrainRequest, num_processes: int, aside: Aside) -> Decided:
    """The layout for `num_processes` of this machine. For a new run of several processes whose config names none.

    Args:
        aside: calls "package.module:function" with arguments in a process of its own. Here CUDA is not initialised,
            whose context would lie on a GPU for as long as the run lasts.
    """
    config = prepared.config
    beside = _beyond_a_plan(config.layout)
    if beside:
        return _default(f"layout.{beside} is set, which a plan does not weigh")
    on_gpu = request.device != "cpu" and torch.cuda.device_count() > 0
    try:
        with _environment_kept(), device_untouched():
            found = _by_size(prepared, _cluster(on_gpu, num_processes, measured=False), num_processes)
        if isinstance(found, Decided):
            return found
        planned = aside(f"{__name__}:{plan_layout.__name__}", request, num_processes, on_gpu, found == UNKNOWN)
        assert isinstance(planned, Decided)
        return planned
    except AllranksError as error:
        return _default(f"it could not be planned: {error}")


def plan_layout(request: TrainRequest, num_processes: int, on_gpu: bool, count: bool) -> Decided:
    """The same in whatever process, from a trace: model() runs here as it is.

    Args:
        count: whether to try first what the parameters alone decide, because they could not be counted without a GPU.
    """
    try:
        prepared = prepare(request)
        found = _by_size(prepared, _cluster(on_gpu, num_processes, measured=False), num_processes) if count else LARGE
        if isinstance(found, Decided):
            return found
        return _planned(prepared, _cluster(on_gpu, num_processes, measured=True), on_gpu)
    except AllranksError as error:
        return _default(f"it could not be planned: {error}")
    except Exception as error:
        # The user's code, in a trace. Where it is a real fault, the workers raise it again.
        line = next(iter(str(error).splitlines()), "")
        return _default(f"it could not be planned: {type(error).__name__}: {line}")


def _by_size(prepared: Prepared, cluster: Cluster, num_processes: int) -> Decided | Literal["unknown", "large"]:
    """What the number of parameters decides; else why it decides nothing.

    UNKNOWN: model() cannot be built without memory, or without a device: a trace has more ways to do so.
    """
    try:
        parameters = count_parameters(prepared.task)
    except Exception:
        return UNKNOWN
    state = STATE_BYTES * parameters * (2 if prepared.config.train.precision == "float64" else 1)
    if state > OBVIOUS * cluster.device.memory_bytes:
        return LARGE
    return _obvious(prepared.config, cluster, num_processes, parameters, state)


def apply(prepared: Config, decided: Decided) -> Config:
    """The config with what was decided in it."""
    return override_config(prepared, decided.overrides) if decided.overrides else prepared


def _default(because: str) -> Decided:
    return Decided((Decision(DEFAULT, because),))


def _beyond_a_plan(layout: LayoutConfig) -> str:
    """The first key that the user set and that is no mode of the search; "" where there is none."""
    usual = LayoutConfig()
    names = (name for name in LayoutConfig.model_fields if name not in MODES)
    return next((name for name in names if getattr(layout, name) != getattr(usual, name)), "")


def _cluster(on_gpu: bool, num_processes: int, *, measured: bool) -> Cluster:
    """This machine; of a processor with the figures of a calibration only where they are needed."""
    if on_gpu:
        from allranks.planning.scale import cluster_of

        return cluster_of(find_cluster("local"), num_processes)
    return cpu_cluster(1, num_processes, None, name="local", calibrated=measured)


def _obvious(config: Config, cluster: Cluster, num_processes: int, parameters: int, state: float) -> Decided:
    layout = Layout.resolve(config.layout, num_processes)
    because = (
        f"the state of {format_count(parameters)} parameters ({format_bytes(state)}) obviously fits in a device's"
        f" {format_bytes(cluster.device.memory_bytes)}; `allranks plan` weighs the others"
    )
    best = {
        "layout": str(layout),
        "because": because,
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "precision": config.train.precision,
        "step_seconds": None,
        "peak_bytes": None,
    }
    document = {
        "schema": 1, "cluster": cluster.name, "devices": num_processes, "parameters": parameters, "best": best
    }  # fmt: skip
    return Decided((Decision(f"layout {layout}", because),), (), document)


def _planned(prepared: Prepared, cluster: Cluster, on_gpu: bool) -> Decided:
    """From a trace of the model and a search over every layout."""
    from allranks.planning.answer import make_plan
    from allranks.planning.corrections import explain
    from allranks.planning.document import plan_document
    from allranks.planning.question import Question, choose_precisions, fixed_micro_steps
    from allranks.profiling.cache import ProfileCache
    from allranks.stepping.profile import load_first, trace_task
    from allranks.stepping.upkeep import upkeep_of

    config, task = prepared.config, prepared.task
    device, loaded = "cuda" if on_gpu else "cpu", load_first(task)
    told: list[Decision] = []

    def make(seq: int | None, precision: str) -> ModelProfile:
        return trace_task(task, precision, device, loaded=loaded, cache=ProfileCache(), tell=told.append)

    precisions, _ = choose_precisions(config.train.precision, cluster)
    profiles = {name: make(None, name) for name in precisions}
    micro_steps = config.train.micro_steps or (1 if task.coupled else None)
    usual = LayoutConfig()
    question = Question(
        make_profile=lambda seq, precision: profiles[precision],
        cluster=cluster,
        global_batch=config.train.global_batch,
        precisions=precisions,
        micro_batch=config.train.micro_batch,
        micro_steps=micro_steps,
        upkeep=upkeep_of(config, device, loaded),
        modes={
            name: str(getattr(config.layout, name))
            for name in MODES
            if getattr(config.layout, name) != getattr(usual, name)
        },
    )
    plan = make_plan(question)
    if plan.leading is None:
        why = plan.refusals[0].because if plan.refusals else "there is none"
        return _default(f"every layout is refused: {why}")
    fixed = (micro_steps or fixed_micro_steps(profiles[precisions[0]])) is not None
    overrides = _overrides(plan.leading.estimate.choice, config, fixed)
    resolve_layout(override_config(config, overrides), cluster.num_devices)  # what it refuses, it says before a start
    if cluster.corrections:
        told.append(Decision(*explain(cluster)))
    decision = _explain(plan.leading, plan.best is not None)
    return Decided((*told, decision), overrides, {**plan_document(plan), "decided": list(overrides)})


def _explain(leading: Ranked, fits: bool) -> Decision:
    choice = leading.estimate.choice
    because = leading.because if fits else f"nothing fits by the plan, and this comes closest: {leading.because}"
    return Decision(f"layout {choice.layout}, micro_batch {choice.micro_batch}", because)


def _overrides(choice: Choice, config: Config, fixed: bool) -> tuple[str, ...]:
    """The keys that mean `choice`; the data-parallel degree stays open, so that a resume may have other processes."""
    from allranks.planning.document import layout_table

    table = layout_table(choice.layout)
    for name in ("dp_shard", "dp_replicate"):
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
