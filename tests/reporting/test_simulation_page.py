"""A Simulation as a page."""

from allranks.reporting.simulation_page import render_simulation_page
from tests.reporting.simulations import simulation


def test_the_page_escapes_names_and_holds_every_plot() -> None:
    page = render_simulation_page(simulation(), "allranks simulate tiny")

    assert "<b>tiny</b>" not in page and "&lt;b&gt;tiny&lt;/b&gt;" in page
    assert "allranks simulate tiny" in page
    for name in ("shares", "intervals", "spares"):
        assert f'id="{name}"' in page
