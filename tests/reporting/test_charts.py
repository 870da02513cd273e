"""A chart holds the values it was given, each series in one colour, in a page that needs nothing else."""

import re
from dataclasses import replace

from allranks.reporting.charts import Panel, draw, render_page

TIMES = {"ddp": [(1, 1.0), (2, 1.5)], "<tp>": [(2, 1.2)]}
SPEED = Panel("speed-up", "processes", "times", TIMES, ideal=[(1, 1), (2, 2)])
SHARE = Panel("efficiency", "processes", "", {"<tp>": [(2, 0.6)], "other": [(4, 0.5)]}, percent=True)


def test_every_value_is_in_its_panel() -> None:
    figure = draw("a < b", [SPEED, SHARE])
    lines = [(trace.name, trace.xaxis, list(zip(trace.x, trace.y, strict=True))) for trace in figure.data]
    assert lines == [
        (None, "x", [(1, 1), (2, 2)]),
        ("ddp", "x", [(1, 1.0), (2, 1.5)]),
        ("<tp>", "x", [(2, 1.2)]),
        ("<tp>", "x2", [(2, 0.6)]),
        ("other", "x2", [(4, 0.5)]),
    ]
    layout = figure.layout
    assert [note.text for note in layout.annotations] == ["speed-up", "efficiency"]
    assert (layout.xaxis.title.text, layout.yaxis.title.text, layout.title.text) == ("processes", "times", "a < b")
    assert (layout.xaxis.tickvals, layout.xaxis2.tickvals) == ((1, 2), (2, 4))
    assert (layout.yaxis.tickformat, layout.yaxis2.tickformat) == (None, ".3~%")
    assert layout.yaxis.rangemode == layout.yaxis2.rangemode == "tozero"


def test_doublings_are_equally_wide_where_that_is_asked() -> None:
    layout = draw("", [SPEED, replace(SPEED, doubling=True)]).layout
    assert (layout.xaxis.type, layout.xaxis2.type) == ("linear", "log")


def test_a_series_has_one_colour_and_one_line_in_the_legend() -> None:
    ideal, ddp, tp, tp_again, other = draw("", [SPEED, SHARE]).data
    assert ideal.line.dash == "dash" and not ideal.showlegend
    assert tp.line.color == tp_again.line.color
    assert len({ddp.line.color, tp.line.color, other.line.color}) == 3
    assert [trace.showlegend for trace in (ddp, tp, tp_again, other)] == [True, True, False, True]


def test_the_page_asks_nobody_for_anything() -> None:
    page = render_page("What more processes do", [SPEED])
    assert page.startswith("<!doctype html>") and "Plotly.newPlot" in page
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page)
