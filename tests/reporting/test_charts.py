"""A chart is well-formed SVG whose marks lie where the values say."""

from xml.etree import ElementTree

import pytest

from allranks.reporting.charts import COLOURS, Panel, render_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*panels: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(render_svg("a < b", panels))


def test_marks_lie_where_the_values_say() -> None:
    root = drawn(Panel("times", "processes", "x", {"ddp": [(1, 1.0), (2, 1.5), (4, 2.5)]}, ideal=[(1, 1), (4, 4)]))
    xs, ys = zip(
        *((float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter(f"{SVG}circle")), strict=True
    )
    assert (xs[2] - xs[0]) == pytest.approx(3 * (xs[1] - xs[0]), abs=0.3)
    assert (ys[0] - ys[2]) == pytest.approx(3 * (ys[0] - ys[1]), abs=0.3)
    assert xs[0] < xs[1] < xs[2] and ys[0] > ys[1] > ys[2]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"0", "1", "2", "4", "5", "times", "processes", "x", "ddp", "a < b"} <= set(words)
    assert [path.attrib["class"] for path in root.iter(f"{SVG}path")].count("i") == 1
    zero = next(float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if text.text == "0") - 4
    assert (zero - ys[1]) == pytest.approx(1.5 * (zero - ys[0]), abs=0.3)


def test_a_series_keeps_its_colour_in_all_panels() -> None:
    panels = [
        Panel("a", "x", "y", {"<one>": [(1, 0.5)], "two": [(1, 1.0)]}, percent=True),
        Panel("b", "x", "y", {"two": [(1, 3)]}),
    ]
    root = drawn(*panels)
    colours = [dot.attrib["fill"] for dot in root.iter(f"{SVG}circle")]
    assert colours == [COLOURS[0], COLOURS[1], COLOURS[1]]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("two") == 1 and "<one>" in words
    assert "100%" in words


@pytest.mark.parametrize("highest", [0.0, 3e-7, 0.4, 0.99, 1.0, 7.3, 23.0, 343.7, 1e6])
def test_no_value_lies_above_the_axis(highest: float) -> None:
    (dot,) = drawn(Panel("", "", "", {"s": [(1, highest)]})).iter(f"{SVG}circle")
    assert 24 <= float(dot.attrib["cy"]) <= 254
    if highest:
        assert float(dot.attrib["cy"]) < 24 + 0.62 * 230  # and the axis is no more than 2.5 times as high
