"""Line charts as SVG: a picture that every browser opens, without a script and without a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

COLOURS = ("#2f6fad", "#c07a18", "#3c8d5a", "#a3417c", "#6b5bb0", "#7a6a4f", "#b0413e", "#4a8c99")
"""Of the series, in their order; they begin anew after the eighth."""

STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:13px;fill:#1b2733}.t{font-size:15px}.m{text-anchor:middle}"
    ".e{text-anchor:end}.g{stroke:#d5dde5}.i{stroke:#8a97a4;stroke-dasharray:5 4;fill:none}.l{fill:none;stroke-width:2}"
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LEGEND = 420, 300, 62, 16, 40, 46, 22
NUM_TICKS = 5
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
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
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    ideal: Points = ()
    percent: bool = False


def render_svg(title: str, panels: Sequence[Panel]) -> str:
    """The panels side by side, with one legend below them: a series has its colour in all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    width, height = WIDTH * len(panels), TOP + HEIGHT + LEGEND * len(names) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="t m" x="{width // 2}" y="20">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        lines += [f'<g transform="translate({index * WIDTH},{TOP})">', *_draw(panel, colours), "</g>"]
    for index, (name, colour) in enumerate(colours.items()):
        y = TOP + HEIGHT + LEGEND * index + 12
        lines.append(f'<path class="l" stroke="{colour}" d="M{LEFT},{y} h28"/>')
        lines.append(f'<text x="{LEFT + 36}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _draw(panel: Panel, colours: Mapping[str, str]) -> list[str]:
    points = [point for series in panel.series.values() for point in series] + list(panel.ideal)
    xs = sorted({x for x, _ in points})
    step = _tick(max((y for _, y in points), default=1.0))
    top = step * NUM_TICKS
    low, span = (xs[0], (xs[-1] - xs[0]) or 1.0) if xs else (0.0, 1.0)

    def place(point: tuple[float, float]) -> str:
        x = LEFT + (point[0] - low) / span * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{HEIGHT - BOTTOM - max(0.0, point[1]) / top * (HEIGHT - BOTTOM - 24):.1f}"

    lines = [f'<text class="m" x="{(LEFT + WIDTH - RIGHT) // 2}" y="10">{escape(panel.title)}</text>']
    for index in range(NUM_TICKS + 1):
        _, y = place((low, index * step)).split(",")
        shown = f"{index * step:.0%}" if panel.percent else f"{index * step:g}"
        lines.append(f'<path class="g" d="M{LEFT},{y} H{WIDTH - RIGHT}"/>')
        lines.append(f'<text class="e" x="{LEFT - 6}" y="{float(y) + 4:.1f}">{shown}</text>')
    for x in xs:
        at = place((x, 0.0)).split(",")[0]
        lines.append(f'<text class="m" x="{at}" y="{HEIGHT - BOTTOM + 18}">{x:g}</text>')
    lines.append(f'<text class="m" x="{(LEFT + WIDTH - RIGHT) // 2}" y="{HEIGHT - 10}">{escape(panel.x)}</text>')
    lines.append(f'<text x="4" y="10">{escape(panel.y)}</text>')
    if panel.ideal:
        lines.append(f'<path class="i" d="M{" L".join(map(place, panel.ideal))}"/>')
    for name, series in panel.series.items():
        lines.append(f'<path class="l" stroke="{colours[name]}" d="M{" L".join(map(place, series))}"/>')
        for point in series:
            x_at, y_at = place(point).split(",")
            lines.append(f'<circle cx="{x_at}" cy="{y_at}" r="3.5" fill="{colours[name]}"/>')
    return lines


def _tick(highest: float) -> float:
    """The smallest round step of which NUM_TICKS reach `highest`."""
    wanted = max(highest, 1e-9) / NUM_TICKS
    power = 10.0 ** (len(f"{wanted:.0f}") - 1) if wanted >= 1 else 1.0
    while power > wanted:
        power /= 10
    return next(factor * power for factor in ROUND if factor * power >= wanted * (1 - 1e-9))
