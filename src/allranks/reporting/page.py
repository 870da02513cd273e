"""A page that opens anywhere: style, script and figures stand in it, and it may not ask a network for anything."""

import re
from typing import TYPE_CHECKING, Any

from allranks.reporting.plotly_bundle import SCRIPT, read_asset

if TYPE_CHECKING:
    from markupsafe import Markup

COLOURS = (
    *("#3b82c4", "#c8741a", "#3f9355", "#c9504c", "#8a6ccc", "#1f939e"),
    *("#c962a0", "#75808a", "#958724", "#8f6d58", "#5f6bd3", "#a3775f"),
)
"""At least 3 to 1 against the light and the dark background."""

CLEAR = "rgba(0,0,0,0)"
CONFIG = {"displayModeBar": False, "displaylogo": False, "responsive": True}


def render_template(name: str, **values: Any) -> str:
    """A template of `reporting/assets`, in the frame of all pages; every string in `values` is escaped.

    What is no string of a user's is passed as Markup. A value that a template asks for and is not given is an error.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(read_asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = Markup(read_asset("page.css")), Markup(read_asset(SCRIPT))
    return environment.get_template(name).render(values, style=style, script=script)


def draw_figure(figure: Any, name: str) -> "Markup":
    """A plotly Figure as the element `name` (and the script that fills it), in the page's own colours and as wide."""
    from markupsafe import Markup

    if re.fullmatch(r"[a-z][a-z-]*", name) is None:
        raise ValueError(f"{name!r} is no name of an element")
    figure.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, autosize=True)
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=CONFIG))
