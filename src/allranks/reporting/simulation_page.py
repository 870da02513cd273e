"""A Simulation as one page of plots that opens anywhere, without a network."""

from allranks.reporting.charts import Panel, draw
from allranks.reporting.page import COLOURS, draw_figure, render_template
from allranks.reporting.simulation_text import MEANINGS, every_of, render_simulation, say_percent, say_share
from allranks.simulation import CAUSES, Simulation


def render_simulation_page(found: Simulation, command: str = "") -> str:
    """Where the time goes, goodput over the interval and over spares, and the whole text (1.2 MB, mostly plotly.js)."""
    interval = Panel(
        "Lost over the time between checkpoints",
        "minutes",
        "share of the time that is not training",
        {"simulated": [(float(f"{every_of(one) / 60:.2g}"), 1 - one.goodput.mean) for one in found.intervals]},
        percent=True,
        doubling=True,
    )
    spares = Panel(
        "Lost over spare nodes",
        "spares",
        "share of the time that is not training",
        {"simulated": [(one.operation.spares, 1 - one.goodput.mean) for one in found.spares]},
        percent=True,
    )
    return render_template(
        "simulation.html",
        title=f"{found.model or 'A run'} on {found.cluster}, simulated",
        goodput=say_percent(found.chosen.goodput),
        command=command,
        text=render_simulation(found),
        shares=draw_figure(_draw_shares(found), "shares"),
        intervals=draw_figure(draw("", [interval]), "intervals"),
        spares=draw_figure(draw("", [spares]), "spares"),
    )


def _draw_shares(found: Simulation) -> object:
    """One bar for each cause but the productive one, with its share of the time."""
    import plotly.graph_objects as graph

    causes = [cause for cause in CAUSES[1:] if found.chosen.shares[cause] > 0]
    shares = [found.chosen.shares[cause] for cause in causes]
    bars = graph.Bar(
        x=shares,
        y=[f"{cause}: {MEANINGS[cause]}" for cause in causes],
        orientation="h",
        marker_color=COLOURS[0],
        text=[say_share(found.chosen.shares[cause], found.chosen.errors[cause]) for cause in causes],
    )
    figure = graph.Figure(bars)
    figure.update_layout(template="plotly_white", height=90 + 45 * len(causes), margin={"t": 20})
    figure.update_xaxes(tickformat=".2%", title_text="share of the time")
    figure.update_yaxes(automargin=True, autorange="reversed")
    return figure
