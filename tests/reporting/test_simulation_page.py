"""A Simulation as a page."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from allranks.reporting.simulation_page import render_simulation_page
from allranks.reporting.simulation_text import MEANINGS
from tests.reporting.simulations import outcome, simulation

PLOTS = "shares", "intervals", "spares"


def drawn(page: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(The one trace of a plot, its layout), as plotly's script gets them."""
    begin = re.search(rf'Plotly\.newPlot\(\s*"{name}",\s*', page)
    assert begin is not None
    traces, end = json.JSONDecoder().raw_decode(page, begin.end())
    layout, _ = json.JSONDecoder().raw_decode(page, page.index("{", end))
    (trace,) = traces
    return trace, layout


def test_the_page_escapes_names_and_holds_every_plot() -> None:
    page = render_simulation_page(simulation(), "allranks simulate tiny")

    assert "<b>tiny</b>" not in page and "&lt;b&gt;tiny&lt;/b&gt;" in page
    assert "allranks simulate tiny" in page
    for name in PLOTS:
        assert f'id="{name}"' in page


def test_what_is_lost_is_drawn_over_every_interval_and_every_number_of_spares() -> None:
    found = simulation(intervals=(outcome(0.92, every=300.0), outcome(0.9), outcome(0.75, every=7410.0)))
    page = render_simulation_page(found)

    intervals, layout = drawn(page, "intervals")
    assert intervals["x"] == [5.0, 10.0, 120.0]  # minutes, of two digits
    assert intervals["y"] == pytest.approx([0.08, 0.1, 0.25])
    assert (layout["xaxis"]["title"]["text"], layout["yaxis"]["tickformat"]) == ("minutes", ".3~%")
    assert layout["xaxis"]["tickvals"] == [5.0, 10.0, 120.0] and layout["xaxis"]["type"] == "log"

    spares, layout = drawn(page, "spares")
    assert spares["x"] == [0, 2, 9]
    assert spares["y"] == pytest.approx([0.5, 0.1, 0.099])
    assert layout["xaxis"]["title"]["text"] == "spares"


def test_a_bar_is_a_cause_with_its_share_and_what_costs_nothing_has_none() -> None:
    chosen = outcome()
    shares = {**chosen.shares, "productive": 0.9, "redone": 0.0625, "waiting": 0.0375}
    page = render_simulation_page(simulation(chosen=replace(chosen, shares=shares)))

    bars, layout = drawn(page, "shares")
    assert bars["y"] == [f"{cause}: {MEANINGS[cause]}" for cause in ("redone", "waiting")]
    assert bars["x"] == [0.0625, 0.0375]
    assert bars["text"] == ["6.25%", "3.75%"]
    assert (bars["orientation"], layout["yaxis"]["autorange"]) == ("h", "reversed")
