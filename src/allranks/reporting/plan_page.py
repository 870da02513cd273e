"""A Plan as one HTML page that opens anywhere, without a network: the best and its because, then the evidence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from allranks.plan import Estimate, MemoryUse, Plan, Ranked, Refusal, Span, StepTime, Traffic
from allranks.reporting.axis_places import Axis, Node, devices_on_node, place_axes, show_nodes
from allranks.reporting.page import COLOURS, draw_figure, render_template
from allranks.reporting.plan_figures import KINDS, Part, draw_memory, draw_timeline, draw_times, parts_of, spare_of
from allranks.reporting.timeline import Timeline, make_timeline
from allranks.units import format_bytes, format_count, format_seconds

MOST_OTHERS = 9
"""Runners-up in the figure of step times; the table has all of them."""

MOST_BY_RULE = 4
"""Refusals by one rule that the page shows."""


@final
@dataclass(frozen=True, slots=True)
class RuleRefusals:
    """What one rule refused: the first few, and how many more."""

    rule: str
    shown: tuple[Refusal, ...]
    left_out: int


@final
@dataclass(frozen=True, slots=True)
class AxisView:
    """An axis, the nodes that its picture shows, and what carries it."""

    axis: Axis
    nodes: tuple[Node, ...]
    links: tuple[str, ...]


def render_plan_page(plan: Plan, command: str = "") -> str:
    """The page (1.2 MB, nearly all of it plotly.js).

    Args:
        plan: where everything on the page comes from; every string in it is escaped.
        command: what makes the page again, as typed in a shell; "": the page does not say.
    """
    leading = plan.leading
    return render_template(
        "plan.html",
        plan=plan,
        leading=leading,
        command=command,
        title=f"{plan.model} on {plan.cluster}",
        ranked=rank_all(plan),
        refusals=group_refusals(plan.refusals),
        evidence=None if leading is None else show_estimate(plan, leading.estimate),
        bytes=format_bytes,
        seconds=format_seconds,
        count=format_count,
        pace=_say_pace,
        bytes_span=_say_bytes,
        seconds_span=_say_seconds,
    )


def rank_all(plan: Plan) -> tuple[tuple[str, Ranked], ...]:
    """(name in figures and tables, entry) of all that are ranked, what leads the plan first."""
    first = [] if plan.leading is None else [("best" if plan.best else "closest", plan.leading)]
    return (*first, *((f"no. {place}", other) for place, other in enumerate(plan.others, start=2)))


def group_refusals(refusals: Sequence[Refusal]) -> tuple[RuleRefusals, ...]:
    """By rule, in the order in which the rules come first."""
    by_rule: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        by_rule.setdefault(refusal.rule, []).append(refusal)
    return tuple(
        RuleRefusals(rule, tuple(mine[:MOST_BY_RULE]), max(0, len(mine) - MOST_BY_RULE))
        for rule, mine in by_rule.items()
    )


def show_estimate(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """The figures of one estimate and what stands beside them, by the names that the template uses."""
    timeline = make_timeline(estimate.choice, estimate.time)
    times = {name: ranked.estimate for name, ranked in rank_all(plan)[: MOST_OTHERS + 1]}
    num_ranks, spare = estimate.choice.layout.pp, spare_of(estimate)
    return {
        "memory_figure": draw_figure(draw_memory(estimate), "memory"),
        "memory_parts": (*_legend(estimate.memory, estimate.stages.values()), *([spare] if spare.size else [])),
        "time_figure": draw_figure(draw_times(times), "times"),
        "time_parts": _legend(estimate.time, [other.time for other in times.values()]),
        "timeline": timeline,
        "timeline_figure": draw_figure(draw_timeline(timeline, num_ranks), "timeline"),
        "timeline_parts": _kinds(timeline),
        "axes": show_axes(plan, estimate),
        "devices_per_node": devices_on_node(plan.num_devices, plan.nodes),
    }


def show_axes(plan: Plan, estimate: Estimate) -> tuple[AxisView, ...]:
    """Where the groups of every axis lie, and the links that the estimate lets them use."""
    per_node, layout = devices_on_node(plan.num_devices, plan.nodes), estimate.choice.layout
    return tuple(
        AxisView(
            axis,
            show_nodes(axis, layout.world_size, plan.nodes, per_node),
            tuple(dict.fromkeys(row.link for row in estimate.traffic if _carries(row, axis.name))),
        )
        for axis in place_axes(layout, per_node)
    )


def _carries(row: Traffic, axis: str) -> bool:
    """Whether the row is of this axis; "dp" is of both data axes."""
    return row.axis == axis or axis.startswith(f"{row.axis}_")


def _legend(first: MemoryUse | StepTime, others: Iterable[MemoryUse | StepTime]) -> tuple[Part, ...]:
    """The parts of the first, as far as it or another one in the figure has any of them."""
    present = {part.name for whole in (first, *others) for part in parts_of(whole) if part.size > 0}
    return tuple(part for part in parts_of(first) if part.name in present)


def _kinds(timeline: Timeline) -> tuple[Part, ...]:
    """The legend of a timeline: what its bars are, and how long each lasts."""
    lengths = {bar.action.kind: bar.end - bar.start for bar in timeline.bars}
    return tuple(
        Part(kind, label, colour, lengths[kind])
        for (kind, label), colour in zip(KINDS.items(), COLOURS, strict=False)
        if kind in lengths
    )


def _say_pace(samples_per_second: float) -> str:
    """Less than one a second keeps its digits."""
    return format_count(samples_per_second) if samples_per_second >= 10 else f"{samples_per_second:.3g}"


def _say_bytes(span: Span) -> str:
    return f"{format_bytes(span.low)} to {format_bytes(span.high)}"


def _say_seconds(span: Span) -> str:
    return f"{format_seconds(span.low)} to {format_seconds(span.high)}"
