"""Line charts as one page that opens anywhere: plotly draws it, and its script stands in the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from allranks.reporting.page import COLOURS, draw_figure, render_template

HEIGHT = 460  # pixels
Points = Sequence[tuple[float, float]]


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Attributes:
        title: above it.
        x, y: what the axes show.
        series: name -> its points (x, y).
        ideal: what nothing is above, dashed; () for none.
        percent: whether y is a fraction that is shown in percent.
        doubling: whether each doubling of x is as wide as any other.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    ideal: Points = ()
    percent: bool = False
    doubling: bool = False


def draw(title: str, panels: Sequence[Panel]) -> Any:
    """The panels side by side, with one legend: a plotly Figure, in which a series has its colour in all panels."""
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=len(panels), subplot_titles=[panel.title for panel in panels])
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    legend: set[str] = set()
    for column, panel in enumerate(panels, start=1):
        if panel.ideal:
            dashed = {"dash": "dash", "color": "#8a97a4"}
            _add(figure, column, panel.ideal, mode="lines", line=dashed, showlegend=False, hoverinfo="skip")
        for name, points in panel.series.items():
            line, shown = {"color": colours[name]}, name not in legend
            _add(figure, column, points, mode="lines+markers", line=line, name=name, legendgroup=name, showlegend=shown)
            legend.add(name)
        ticks = sorted({x for points in panel.series.values() for x, _ in points})
        scale = "log" if panel.doubling else "linear"
        figure.update_xaxes(title_text=panel.x, tickvals=ticks, type=scale, col=column)
        form = ".3~%" if panel.percent else None  # as many digits as tell ticks apart
        figure.update_yaxes(title_text=panel.y, tickformat=form, rangemode="tozero", col=column)
    figure.update_layout(
        title=title,
        height=HEIGHT,
        template="plotly_white",
        margin={"t": 70 if title else 40},
        legend={"orientation": "h", "y": -0.25},
    )
    return figure


def render_page(title: str, panels: Sequence[Panel]) -> str:
    """`draw` as one HTML page, which asks no server for anything (1.2 MB, nearly all of it plotly.js)."""
    about = "; ".join(f"{panel.title} over {panel.x}" for panel in panels)
    return render_template("chart.html", title=title, about=about, figure=draw_figure(draw("", panels), "chart"))


def _add(figure: Any, column: int, points: Points, **look: Any) -> None:
    figure.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], row=1, col=column, **look)
