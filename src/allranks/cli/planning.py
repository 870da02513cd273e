"""From a PlanRequest to a printed Plan and an exit code."""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from allranks.cli.output import print_json, stdout_kept_free, write_printed
from allranks.cli.planned_model import Subject, find_subject
from allranks.cluster import Cluster
from allranks.config_sections import PROCESS_AXES, LayoutConfig
from allranks.durable import check_target, write_whole
from allranks.errors import ConfigError
from allranks.layout import parse_layout
from allranks.layout_string import layout_values, render_layout
from allranks.plan import Plan
from allranks.plan_request import PlanRequest
from allranks.planning.amounts import MOST_SAMPLES, POSITIONS, TIMES, check_amount, read_number
from allranks.planning.answer import make_plan, plan_gpus, plan_seq
from allranks.planning.asked_modes import modes_of, notes_of
from allranks.planning.bill_suspicions import suspect_price, suspect_watts
from allranks.planning.cluster_limits import MOST_WATTS
from allranks.planning.document import PLAN_FILE, RUN_FILE, plan_document, run_toml
from allranks.planning.hardware import find_cluster
from allranks.planning.question import (
    MakeProfile,
    Question,
    Rehearse,
    choose_precisions,
    fixed_micro_steps,
)
from allranks.planning.scale import cluster_of
from allranks.upkeep import Upkeep

ASK = "?"
DEFAULTS = "the Task's defaults"
FITS, NOT, REFUSED = 0, 1, 2
_THOUSANDS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@final
@dataclass(frozen=True)
class Asked:
    """A question, and whether it asks for the fewest devices or the longest samples."""

    question: Question
    gpus: bool
    seq: bool

    def with_dry_runs(self, rehearse: Rehearse | None) -> "Asked":
        """The same, whose plan dry runs correct."""
        return replace(self, question=replace(self.question, rehearse=rehearse))

    def plan(self) -> Plan:
        """The plan that answers."""
        if self.gpus:
            return plan_gpus(self.question)
        return plan_seq(self.question) if self.seq else make_plan(self.question)


def answer(request: PlanRequest) -> int:
    """Print the plan of each cluster; the exit code of the best of them.

    Raises:
        AllranksError: what is asked cannot be answered.
    """
    _check_places(request)
    with stdout_kept_free(request.json):
        clusters = [find_cluster(text) for text in request.cluster]
        subject = find_subject(request)
        rehearsals = _rehearsals(request, subject)
        asked = [
            ask(request, subject, cluster).with_dry_runs(rehearse)
            for cluster, rehearse in zip(clusters, rehearsals, strict=True)
        ]
        plans = [one.plan() for one in asked]
        best = min(plans, key=_order)
        make_profile = asked[plans.index(best)].question.make_profile
    if request.json:
        print_json(_document(request, plans, best, make_profile))
    else:
        _print(request, plans, best, subject.task is None, make_profile)
    with stdout_kept_free(request.json):
        refused = write_printed(lambda: _write(request, subject, best, make_profile))
    return refused or exit_code(best)


def _check_places(request: PlanRequest) -> None:
    """Before all work: may the files be written? Raises ConfigError."""
    saved = () if request.save is None else (request.save / PLAN_FILE, request.save / RUN_FILE)
    for path in (*saved, *(() if request.html is None else (request.html,))):
        check_target(path)


def _rehearsals(request: PlanRequest, subject: Subject) -> list[Rehearse | None]:
    """What makes dry runs for each `--cluster`, within one limit of time; None where none are asked for."""
    if not request.check:
        return [None] * len(request.cluster)
    from allranks.cli.checking import Rehearser

    rehearser = Rehearser(request, subject)
    return [partial(rehearser, where=text) for text in request.cluster]


def _number_of_devices(text: str) -> int:
    if re.fullmatch(r"-\s*\d.*|0+(\.0*)?", text.strip()):
        raise ConfigError(f"--gpus {text}: no devices; give at least 1, or '?' to ask how many are needed")
    return _whole(text, {"": 1}, "--gpus")


def _whole(text: str, units: Mapping[str, float], option: str) -> int:
    found = read_number(text, units, option)
    if found < 1 or found != int(found):
        raise ConfigError(f"{option} {text}: a whole number of at least 1")
    return int(found)


def exit_code(plan: Plan) -> int:
    """0 fits, 1 does not or not within the limits, 2 every layout is refused."""
    if plan.leading is None:
        return REFUSED
    return FITS if plan.best is not None and not plan.unmet else NOT


def ask(request: PlanRequest, subject: Subject, cluster: Cluster) -> Asked:
    """The question that `request` puts for one cluster. Raises ConfigError for a value of another form."""
    _check_amounts(request)
    if request.gpus is not None and request.gpus != ASK:
        cluster = cluster_of(cluster, _number_of_devices(request.gpus))
    cluster = replace(
        cluster,
        device_hour_price=cluster.device_hour_price if request.price is None else request.price,
        device_watts=cluster.device_watts if request.watts is None else request.watts,
    )
    priced = () if request.price is None else suspect_price(cluster, "--price")
    watched = () if request.watts is None else suspect_watts(cluster, "--watts")
    precisions, notes = _precisions(request, subject, cluster)
    seq = None if request.seq in (None, ASK) else _whole(request.seq or "", POSITIONS, "--seq")
    batch = request.global_batch if request.global_batch is not None else subject.global_batch
    question = Question(
        make_profile=subject.profiles_on(cluster),
        cluster=cluster,
        global_batch=1 if batch is None else batch,
        precisions=precisions,
        seq=seq,
        micro_batch=subject.micro_batch if request.micro_batch is None else request.micro_batch,
        micro_steps=subject.micro_steps,
        tokens=None if request.tokens is None else read_number(request.tokens, _THOUSANDS, "--tokens"),
        limit_seconds=None if request.deadline is None else read_number(request.deadline, TIMES, "--deadline"),
        limit_money=request.budget,
        what_ifs=request.what_if,
        notes=(*subject.notes, *notes, *priced, *watched),
        upkeep=_upkeep(request, subject, cluster),
        follows_length=batch is None,
    )
    question = _with_layout(question, request, subject)
    if question.follows_length and request.gpus == ASK:
        question = replace(question.in_usual_batch(seq or subject.seq), follows_length=False)
    elif question.follows_length and request.seq != ASK:
        question = replace(question.of_length(seq or subject.seq), seq=seq)
    if request.gpus == ASK and question.layout is not None:
        _check_open(question.layout)
    return Asked(question, gpus=request.gpus == ASK, seq=request.seq == ASK)


def _precisions(request: PlanRequest, subject: Subject, cluster: Cluster) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that are open, and what is noted of them and of the micro-batch: what the Task's defaults name, binds.

    So it does for `allranks train`.
    """
    source = DEFAULTS if request.precision is None and "precision" in subject.defaulted else ""
    precisions, notes = choose_precisions(request.precision or subject.precision, cluster, source)
    if request.micro_batch is None and "micro_batch" in subject.defaulted:
        notes = *notes, f"micro-batch {subject.micro_batch}, because {DEFAULTS} name it"
    return precisions, notes


def _check_amounts(request: PlanRequest) -> None:
    if request.gpus == request.seq == ASK:
        raise ConfigError("--gpus '?' and --seq '?' are two questions: give one of them a number")
    for given, option in ((request.global_batch, "--global-batch"), (request.micro_batch, "--micro-batch")):
        check_amount(given, option, MOST_SAMPLES)
    check_amount(request.budget, "--budget")
    check_amount(request.price, "--price")
    check_amount(request.watts, "--watts", float(MOST_WATTS))
    for amount, option in ((request.price, "--price"), (request.watts, "--watts")):
        if amount is not None and request.tokens is None:
            raise ConfigError(f"{option} needs --tokens: money and energy are those of training on them, as in 15T")


def _upkeep(request: PlanRequest, subject: Subject, cluster: Cluster) -> Upkeep:
    """What the Task's config says of it, but for what the command line does. Raises ConfigError."""
    found = subject.upkeep(cluster.device.kind, bool(cluster.machine))
    if request.checkpoint_every is None:
        return found
    if request.checkpoint_every < 1:
        raise ConfigError("--checkpoint-every is a whole number of steps of at least 1")
    return replace(found, save_every=request.checkpoint_every)


def _with_layout(question: Question, request: PlanRequest, subject: Subject) -> Question:
    """The layout that the user wrote, or the modes alone where degrees are left open; of what is not weighed a note.

    `--layout` stands above the Task's config, as for `train`: it names all degrees, and leaves the other modes.
    """
    config, named = subject.layout or LayoutConfig(), {}
    if request.layout is not None:
        parse_layout(request.layout)
        named = layout_values(request.layout)
        config = LayoutConfig.model_validate({**config.model_dump(), **named})
    question = replace(question, notes=(*question.notes, *notes_of(config)))
    return replace(question, layout=config) if config.chosen else replace(question, modes=modes_of(config, named))


def _check_open(config: LayoutConfig) -> None:
    """A layout of numbers alone is of so many devices, whatever they are asked for."""
    degrees = [getattr(config, axis) for axis in PROCESS_AXES]
    if config.kind == "mesh" and all(isinstance(degree, int) for degree in degrees):
        number = math.prod(degrees)
        devices = "1 device" if number == 1 else f"{number} devices"
        raise ConfigError(
            f"--gpus '?': the layout {render_layout(config)} is of {devices}, so that there is nothing to look for;"
            f" give --gpus {number}, or leave a degree open, as in dp_shard=* or auto"
        )


def _order(plan: Plan) -> tuple[bool, bool, float]:
    """The one that fits, keeps the limits and is the fastest comes first."""
    pace = plan.leading.estimate.samples_per_second if plan.leading else 0.0
    return plan.best is None, bool(plan.unmet), -pace


def _document(request: PlanRequest, plans: list[Plan], best: Plan, make_profile: MakeProfile) -> dict[str, Any]:
    document = plan_document(best)
    if request.explain:
        from allranks.planning.guide import explanation_document

        document |= explanation_document(best, make_profile)
    return document if len(plans) == 1 else {**document, "clusters": [plan_document(plan) for plan in plans]}


def _print(request: PlanRequest, plans: list[Plan], best: Plan, by_sizes: bool, make_profile: MakeProfile) -> None:
    from allranks.reporting.plan_text import render_comparison, render_plan

    print(render_plan(best))
    if len(plans) > 1:
        print("\n" + render_comparison(plans))
    if request.explain:
        from allranks.planning.guide import render_explanation

        print("\n" + render_explanation(best, make_profile))
    if request.save is not None and best.leading is not None:
        print("\n" + _next(request.save / RUN_FILE, best, by_sizes))


def _next(path: Path, plan: Plan, by_sizes: bool) -> str:
    """What trains the saved plan; of one that does not fit, that nothing does."""
    if plan.best is None:
        return f"{path} holds the closest, which does not fit: it is there to be changed, not to be trained"
    return f"Next\n  allranks train {'TASK ' if by_sizes else ''}{path}"


def _write(request: PlanRequest, subject: Subject, plan: Plan, make_profile: MakeProfile) -> None:
    """plan.json, RUN.toml and the page, as far as they are asked for."""
    if request.save is not None:
        if plan.leading is None:
            raise ConfigError(f"--save {request.save}: every layout is refused, so there is nothing to save")
        choice = plan.leading.estimate.choice
        micro_steps = subject.micro_steps or fixed_micro_steps(make_profile(None, choice.precision))
        given = {} if request.checkpoint_every is None else {"checkpoint.every": request.checkpoint_every}
        text = run_toml(choice, _beside(subject.task, request.save), micro_steps, {**subject.settings, **given})
        write_whole(request.save / PLAN_FILE, json.dumps(plan_document(plan), indent=2, allow_nan=False) + "\n")
        head = "" if plan.best is not None else f"# The closest on {plan.cluster}: {plan.leading.because}\n"
        write_whole(request.save / RUN_FILE, head + text)
    if request.html is not None:
        from allranks.reporting.plan_page import render_plan_page

        write_whole(request.html, render_plan_page(plan, shlex.join(["allranks", *sys.argv[1:]])))


def _beside(task: str | None, folder: Path) -> str | None:
    """A task's file relative to the folder of RUN.toml, so that both can be moved together."""
    if task is None:
        return None
    place, colon, name = (task, "", "") if task.endswith(".py") else task.rpartition(":")
    # A module stays as it is, also one of whose parts begins with py: research.pytorch.tasks.
    return os.path.relpath(place, folder.absolute()) + colon + name if place.endswith(".py") else task
