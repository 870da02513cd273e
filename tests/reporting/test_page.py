"""A page holds what it needs, escapes what it is given, and may not load anything."""

import re

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup
from plotly.graph_objects import Figure

from allranks.reporting.page import draw_figure, render_template


def page(title: str) -> str:
    return render_template("chart.html", title=title, about="a & b", figure=draw_figure(Figure(), "drawn"))


def test_strings_are_escaped_and_figures_are_not() -> None:
    text = page("<script>alert(1)</script>")
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text and 'aria-label="a &amp; b"' in text
    assert '<div id="drawn"' in text and "&lt;div" not in text


def test_style_and_script_stand_in_the_page_once() -> None:
    text = page("t")
    assert text.count("plotly.js (basic - minified)") == 1 and "prefers-color-scheme: dark" in text


def test_the_browser_is_told_to_load_nothing() -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page("t"))
    assert policy is not None
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy[1].split("; ")}
    assert rules["default-src"] == ["'none'"]
    assert not any("http" in word or "*" in word for words in rules.values() for word in words)
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", page("t"))


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render_template("chart.html", title="t")


def test_names_of_elements_are_plain() -> None:
    with pytest.raises(ValueError, match="no name of an element"):
        draw_figure(Figure(), 'x" onload="')


def test_a_figure_s_texts_cannot_end_its_script() -> None:
    figure = Figure()
    figure.add_bar(x=[1], y=["</script><script>alert(1)"])
    assert "</script><script>alert" not in draw_figure(figure, "drawn")


def test_figures_follow_their_boxes() -> None:
    """Behind the figures, which have to be there before they are observed."""
    page = render_template("chart.html", title="t", about="a", figure=Markup('<div class="js-plotly-plot"></div>'))
    assert page.index("js-plotly-plot") < page.index("new ResizeObserver")
    assert "Plotly.Plots.resize(box.target)" in page
