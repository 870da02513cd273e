"""The pictures of the collectives page: what three ranks hold before and after each one.

The numbers are data, and a test makes the real calls with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Rows = tuple[tuple[int, ...], ...]

STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:14px;fill:#1b2733}.t{font-size:13px;fill:#4a5a6a}"
    ".m{text-anchor:middle}.p{fill:#cfe3f7;stroke:#2f6fad;stroke-width:1.5}"
    ".q{fill:#fbe3c0;stroke:#c07a18;stroke-width:1.5}.e{fill:#f4f6f8;stroke:#b8c2cc;stroke-width:1.5}"
    ".l{stroke:#4a5a6a;stroke-width:1.5;fill:none}"
)
BOX, GAP, LEFT, TOP = 132, 34, 70, 18


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of three ranks.

    Attributes:
        before: what each rank gives; () where it gives nothing.
        after: what each rank has then; () where it gets nothing.
        words: what happens, for those who do not see the picture.
    """

    before: Rows
    after: Rows
    words: str


GIVEN: Rows = ((1, 2, 3), (10, 20, 30), (100, 200, 300))
PARTS: Rows = ((1, 2), (10, 20), (100, 200))
ALL = (1, 2, 10, 20, 100, 200)
SUM = (111, 222, 333)

COLLECTIVES: Mapping[str, Collective] = {
    "broadcast": Collective(((1, 2, 3), (), ()), ((1, 2, 3),) * 3, "every rank gets what rank 0 has"),
    "all-reduce": Collective(GIVEN, (SUM,) * 3, "every rank gets the sum"),
    "gather": Collective(PARTS, (ALL, (), ()), "rank 0 gets all parts"),
    "all-gather": Collective(PARTS, (ALL,) * 3, "every rank gets all parts"),
    "reduce-scatter": Collective(GIVEN, ((111,), (222,), (333,)), "every rank gets its part of the sum"),
    "all-to-all": Collective(
        GIVEN, ((1, 10, 100), (2, 20, 200), (3, 30, 300)), "every rank gives a part to every rank"
    ),
    "barrier": Collective(((), (), ()), ((), (), ()), "every rank waits until all are there"),
}


def draw(name: str) -> str:
    """The picture of one collective, as SVG."""
    collective = COLLECTIVES[name]
    width, height = LEFT + 2 * BOX + 150, TOP + 3 * GAP + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{name}: {collective.words}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#4a5a6a"/></marker></defs>',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#d5dde5"/>',
    ]
    right = LEFT + BOX + 120
    for rank, (given, got) in enumerate(zip(collective.before, collective.after, strict=True)):
        y = TOP + rank * GAP
        lines.append(f'<text class="t" x="16" y="{y + 19}">rank {rank}</text>')
        lines += [_box(LEFT, y, given, "p"), _box(right, y, got, "q")]
    middle = TOP + 3 * GAP // 2 - 3
    lines.append(f'<path class="l" d="M{LEFT + BOX + 12},{middle} H{right - 12}" marker-end="url(#a)"/>')
    lines.append(f'<text class="m" x="{LEFT + BOX + 60}" y="{middle - 10}">{name}</text>')
    lines.append(f'<text class="m t" x="{width // 2}" y="{height - 16}">{collective.words}</text></svg>')
    return "\n".join(lines) + "\n"


def _box(x: int, y: int, numbers: tuple[int, ...], kind: str) -> str:
    shown = "  ".join(map(str, numbers)) or "nothing"
    box = f'<rect class="{kind if numbers else "e"}" x="{x}" y="{y}" width="{BOX}" height="28" rx="4"/>'
    return f'{box}<text class="m" x="{x + BOX // 2}" y="{y + 19}">{shown}</text>'
