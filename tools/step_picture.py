"""The picture of one sharded step: the first output on docs/how-to/sharding.md, which a test holds to the command."""

import re
from typing import NamedTuple

COLUMN, LANE, LEFT, TOP, WIDE, HIGH = 60, 52, 92, 34, 52, 36
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#1b2733}.s{font-size:10px;fill:#4a5a6a}"
    ".m{text-anchor:middle}.gather{fill:#cfe3f7;stroke:#2f6fad}.compute{fill:#e9ecef;stroke:#7b8794}"
    ".drop{fill:#fff;stroke:#8a97a4;stroke-dasharray:4 3}.reduce-scatter,.all-reduce{fill:#fbe3c0;stroke:#c07a18}"
    ".w{fill:#eef5fc}.l{stroke:#b8c2cc}"
)
WORDS = {"gather": "gather", "compute": "compute", "drop": "drop", "reduce-scatter": "reduce"}


class Event(NamedTuple):
    """One line of the output; `size` as it stands there, "" for none."""

    phase: str
    what: str
    unit: str
    size: str


def read_events(page: str) -> list[Event]:
    """The first step that the page shows, without the update."""
    table = re.search(r"^phase +what.*?\n(.*?)^A rank receives", page, re.MULTILINE | re.DOTALL)
    assert table is not None, "the page shows no step"
    found: list[Event] = []
    for line in table[1].splitlines():
        phase, (what, unit, *sizes) = line[:10].strip(), re.split(r" {2,}", line[10:].strip())
        found.append(Event(phase or found[-1].phase, what, unit, sizes[0] if sizes else ""))
    return [event for event in found if event.phase != "update"]


def draw_step(page: str) -> str:
    """Units are lanes and time goes right; a lane is shaded while the unit is whole on every rank."""
    events = read_events(page)
    units = list(dict.fromkeys(event.unit for event in events))
    width, height = LEFT + COLUMN * len(events) + 12, TOP + LANE * len(units) + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="one step: units are gathered, computed and dropped, and their gradients reduced">',
        f"<style>{STYLE}</style>",
    ]
    for lane, unit in enumerate(units):
        y = TOP + LANE * lane
        lines.append(f'<text x="4" y="{y + 22}">{unit}</text>')
        lines += [
            f'<rect class="w" x="{x}" y="{y - 4}" width="{w}" height="{HIGH + 8}"/>' for x, w in _whole(events, unit)
        ]
    backward = [event.phase for event in events].index("backward")
    for phase, first in (("forward", 0), ("backward", backward)):
        lines.append(f'<text x="{LEFT + COLUMN * first}" y="14">{phase}</text>')
    x = LEFT + COLUMN * backward - 4
    lines.append(f'<path class="l" d="M{x},4 V{height - 8}"/>')
    for column, event in enumerate(events):
        x, y = LEFT + COLUMN * column, TOP + LANE * units.index(event.unit)
        lines.append(f'<rect class="{event.what}" x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="3"/>')
        lines.append(f'<text class="s m" x="{x + WIDE // 2}" y="{y + 15}">{WORDS.get(event.what, event.what)}</text>')
        lines.append(f'<text class="s m" x="{x + WIDE // 2}" y="{y + 28}">{event.size}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _whole(events: list[Event], unit: str) -> list[tuple[int, int]]:
    """(x, width) of each stretch between a gather of the unit and what drops it."""
    found, since = list[tuple[int, int]](), None
    for column, event in enumerate(events):
        if event.unit == unit and event.what == "gather":
            since = column
        elif event.unit == unit and event.what == "drop" and since is not None:
            found.append((LEFT + COLUMN * since, COLUMN * (column - since)))
            since = None
    return found
