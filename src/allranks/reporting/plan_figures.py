"""The figures of a plan's page: memory by category, step time by cause, and the timeline of one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

from allranks.plan import Estimate, MemoryUse, StepTime
from allranks.reporting.page import COLOURS
from allranks.reporting.plan_text import SPARE, spare_bytes
from allranks.reporting.timeline import Timeline
from allranks.units import format_bytes, format_seconds

HOLDINGS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits",
    "gathered": "gathered blocks",
    "communication": "message buffers",
    "framework": "framework",
}
CAUSES = {
    "compute": "computation",
    "recompute": "repeated forwards",
    "tensor": "tp messages",
    "context": "cp messages",
    "expert": "ep messages",
    "data": "gradients and gathers",
    "pipeline": "stage messages",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "offload": "moves to the host",
    "input": "input",
    "checkpoint": "checkpoints",
}
KINDS = {"forward": "forward", "backward": "backward", "weight": "backward of the weights"}
ROW, MARGIN = 38, 64  # pixels

CUT = 3.0
"""A step that takes so many times the first one's is cut off at the figure's edge, and its time stands there."""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A category or a cause, as every figure shows it: its colour, and how much of the whole it is."""

    name: str
    label: str
    colour: str
    size: float


def parts_of(whole: MemoryUse | StepTime) -> tuple[Part, ...]:
    """All parts in the order of the noun's fields; some may be 0."""
    labels = HOLDINGS if isinstance(whole, MemoryUse) else CAUSES
    names = [part.name for part in fields(whole)]
    return tuple(
        Part(name, labels[name], COLOURS[place], float(getattr(whole, name))) for place, name in enumerate(names)
    )


def spare_of(estimate: Estimate) -> Part:
    """What the allocator holds beyond all categories, on the fullest rank; may be 0."""
    return Part("spare", SPARE, COLOURS[len(HOLDINGS)], spare_bytes(estimate))


def draw_memory(estimate: Estimate) -> Any:
    """Bytes by category on the fullest rank and on the stages, the interval of the peak, and the device's capacity.

    The allocator's spare is known of the fullest rank: with it the bar ends at the expected peak.
    """
    stages = sorted(estimate.stages.items()) if estimate.choice.layout.pp > 1 else []
    rows = {"fullest": estimate.memory} | {f"stage {stage}": use for stage, use in stages}
    spare, none = spare_of(estimate), replace(spare_of(estimate), size=0.0)
    parts = {name: (*parts_of(use), spare if name == "fullest" else none) for name, use in rows.items()}
    figure = _stack(parts, 1e-9, format_bytes)
    peak = estimate.peak_bytes
    _add_interval(figure, "fullest", (peak.low, peak.expected, peak.high), 1e-9, format_bytes)
    capacity = estimate.capacity_bytes * 1e-9
    figure.add_vline(x=capacity, line={"color": "#c9504c", "width": 2, "dash": "dash"})
    most = max(capacity, peak.high * 1e-9, *(use.total * 1e-9 for use in rows.values()))
    side = "right" if capacity > most / 2 else "left"
    note = f"capacity {format_bytes(estimate.capacity_bytes)}"
    figure.add_annotation(x=capacity, y=1, yref="paper", yanchor="bottom", xanchor=side, text=note, showarrow=False)
    figure.update_xaxes(title_text="GB", range=[0, most * 1.06])
    return figure


def draw_times(estimates: Mapping[str, Estimate]) -> Any:
    """Seconds of a step by cause, one row for each name, with the interval of the whole."""
    first, *others = (estimate.step_seconds.high for estimate in estimates.values())
    longest = max([first, *(high for high in others if high <= CUT * first)])
    scale, unit = _time_unit(longest)
    figure = _stack({name: parts_of(estimate.time) for name, estimate in estimates.items()}, scale, format_seconds)
    for name, estimate in estimates.items():
        seconds = estimate.step_seconds
        _add_interval(figure, name, (seconds.low, seconds.expected, seconds.high), scale, format_seconds)
        if seconds.high > longest:
            told = f"<b>{format_seconds(seconds.expected)} →</b>"
            figure.add_annotation(
                x=1, xref="paper", xanchor="right", y=name, text=told, showarrow=False, bgcolor="#3b4551",
                font={"color": "#ffffff"}, name="cut",
            )  # fmt: skip
    figure.update_xaxes(title_text=unit, range=[0, longest * scale * 1.06])
    return figure


def draw_timeline(timeline: Timeline, num_ranks: int) -> Any:
    """One row for each place in the pipeline; further stages of a place are paler."""
    from plotly.graph_objects import Figure

    end = timeline.seconds + sum(seconds for _, seconds in timeline.after)
    scale, unit = _time_unit(end)
    names = [f"pp {rank}" for rank in range(num_ranks)] if num_ranks > 1 else ["device"]
    figure = Figure()
    colours = dict(zip(KINDS, COLOURS, strict=False))
    for kind, chunk in sorted({(bar.action.kind, bar.action.stage // num_ranks) for bar in timeline.bars}):
        bars = [bar for bar in timeline.bars if (bar.action.kind, bar.action.stage // num_ranks) == (kind, chunk)]
        figure.add_bar(
            y=[names[bar.rank] for bar in bars],
            x=[_short((bar.end - bar.start) * scale) for bar in bars],
            base=[_short(bar.start * scale) for bar in bars],
            customdata=[
                f"{KINDS[kind]} of micro-step {bar.action.micro_step}, stage {bar.action.stage}" for bar in bars
            ],
            hovertemplate=f"%{{customdata}}<br>%{{base:.4g}} {unit}<extra></extra>",
            orientation="h",
            marker={"color": colours[kind], "opacity": 0.6 if chunk else 1.0, "line": {"width": 0.5, "color": "#888"}},
        )
    start = timeline.seconds
    for part in parts_of(StepTime(**dict(timeline.after))):
        if part.size:
            told = f"{part.label}: {format_seconds(part.size)}"
            figure.add_bar(
                y=names, x=[part.size * scale] * num_ranks, base=[start * scale] * num_ranks, orientation="h",
                marker={"color": part.colour}, hovertemplate=f"{told}<extra></extra>",
            )  # fmt: skip
            start += part.size
    _set_look(figure, names, max(22, 34 - num_ranks))
    figure.update_layout(barmode="overlay", bargap=0.12, dragmode="zoom")
    figure.update_xaxes(title_text=unit, range=[0, end * scale], fixedrange=False)
    return figure


def _time_unit(seconds: float) -> tuple[float, str]:
    """What seconds are multiplied with on an axis that ends there, and the name of that unit."""
    return (1 / 60, "min") if seconds > 600 else (1.0, "s") if seconds >= 1 else (1e3, "ms")


def _short(value: float) -> float:
    """As many digits as a screen shows: a page of a thousand bars stays small."""
    return float(f"{value:.5g}")


def _stack(rows: Mapping[str, Sequence[Part]], scale: float, say: Any) -> Any:
    """Horizontal bars of parts on each other, the first row on top."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for parts in zip(*rows.values(), strict=True):
        if any(part.size for part in parts):
            figure.add_bar(
                y=list(rows),
                x=[part.size * scale for part in parts],
                customdata=[say(part.size) for part in parts],
                name=parts[0].label,
                orientation="h",
                marker={"color": parts[0].colour},
                hovertemplate=f"%{{y}}: {parts[0].label} %{{customdata}}<extra></extra>",
            )
    _set_look(figure, list(rows), ROW)
    figure.update_layout(barmode="stack", bargap=0.3)
    return figure


def _add_interval(figure: Any, row: str, span: tuple[float, float, float], scale: float, say: Any) -> None:
    low, expected, high = span
    error = {"array": [(high - expected) * scale], "arrayminus": [(expected - low) * scale], "symmetric": False}
    figure.add_scatter(
        x=[expected * scale], y=[row], mode="markers", marker={"symbol": "diamond", "size": 7, "color": "#888"},
        error_x={"type": "data", "color": "#888", "thickness": 2, "width": 6, **error},
        hovertemplate=f"{say(expected)}, in 9 of 10 cases {say(low)} to {say(high)}<extra></extra>",
    )  # fmt: skip


def _set_look(figure: Any, rows: Sequence[str], row_height: int) -> None:
    figure.update_layout(
        template="none",
        showlegend=False,
        height=len(rows) * row_height + MARGIN + 12,
        margin={"l": 8, "r": 12, "t": 22, "b": 42},
        font={"size": 13, "family": "system-ui, sans-serif"},
        dragmode=False,
    )
    figure.update_yaxes(
        autorange="reversed",
        type="category",
        categoryarray=list(rows),
        automargin=True,
        fixedrange=True,
        ticklabelstandoff=6,
    )
    figure.update_xaxes(fixedrange=True, gridcolor="#8884", zeroline=False, nticks=7, automargin=True)
