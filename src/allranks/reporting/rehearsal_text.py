"""A Rehearsal as text, for a terminal of 100 columns: the verdict first, then memory, messages and findings."""

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from allranks.rehearsal import CATEGORIES, Moment, RankRehearsal, Rehearsal, Remedy
from allranks.rehearsed_messages import Collective
from allranks.reporting.as_text import as_text
from allranks.units import format_bytes, format_count

WIDTH = 100
BAR_CELLS = 24
BESIDE_UNIT = 62 + BAR_CELLS
"""Columns of a row of moments without its unit."""
SHOWN = 12
MOST = "-"
DRAWN = {
    "weights": ("w", "#2f6fad"),
    "gradients": ("g", "#c05b2e"),
    "optimizer": ("o", "#6a51a3"),
    "activations": ("a", "#3b8f4a"),
    "logits": ("l", "#b8962e"),
    "gathered": ("G", "#6fa8dc"),
    "communication": ("c", "#a64d79"),
    "other": ("x", "#777777"),
}
"""Category -> its letter and color in a bar."""


def render_rehearsal(told: Rehearsal, *, width: int = WIDTH) -> str:
    """The whole of it, at most `width` columns wide."""
    fullest = max(told.ranks.values(), key=lambda rank: rank.peak_bytes)
    parts: list[RenderableType] = [
        Text(f"{told.model} under {told.layout} on {told.cluster}: {told.world_size} processes, one step rehearsed"),
        Text(render_verdict(told)),
        Text(),
        _ranks(told),
        Text(),
        Text(f"What fills rank {fullest.rank} at its peak ({fullest.at})"),
        _categories(fullest),
        Text(),
        Text("Which modules hold it"),
        _holdings(fullest),
        *_host(told),
        Text(),
        Text(f"What rank {fullest.rank} sends and receives in a step"),
        _collectives(fullest.collectives),
    ]
    for title, body in (
        ("Found", _findings(told)),
        ("What would help (each rehearsed; the cheapest in speed first)", _remedies(told)),
        ("Decided for you", _lines(told.decisions)),
        ("Not rehearsed", _lines(told.unrehearsed)),
    ):
        if body is not None:
            parts += [Text(), Text(title), body]
    if told.next_move:
        parts += [Text(), Text(f"Next: {told.next_move}")]
    return as_text(parts, width)


def render_verdict(told: Rehearsal) -> str:
    """`fits: 24.1 GB of 78.8 GB at the peak, 50.2 GB free beside a margin of 4.5 GB`."""
    margin = f"beside a margin of {format_bytes(told.margin_bytes)}" if told.margin_bytes else "with no margin"
    used = f"{format_bytes(told.peak_bytes)} of {format_bytes(told.capacity_bytes)} at the peak"
    if told.fails:
        return f"would fail: see Found ({used})"
    if told.free_bytes < 0:
        return f"does not fit: {used}, {format_bytes(-told.free_bytes)} too much {margin}"
    if not told.fits and told.host_capacity_bytes is not None:
        waits, has = format_bytes(told.host_peak_bytes), format_bytes(told.host_capacity_bytes)
        return f"does not fit: {waits} would wait in the host's memory, of which a process has {has} ({used})"
    return f"fits: {used}, {format_bytes(told.free_bytes)} free {margin}"


def render_moments(rank: RankRehearsal, *, width: int = WIDTH) -> str:
    """One rank's step, stretch by stretch."""
    parts: list[RenderableType] = [Text(f"One step of rank {rank.rank}"), _moments(rank), _legend(rank.moments)]
    return as_text(parts, max(width, _widest(rank.moments)))


def draw_moments(rank: RankRehearsal, *, width: int = WIDTH) -> str:
    """The same as an SVG document."""
    console = Console(
        file=io.StringIO(), record=True, width=max(width, _widest(rank.moments)), color_system="truecolor"
    )
    console.print(_moments(rank))
    console.print(_legend(rank.moments))
    return console.export_svg(title=f"one step of rank {rank.rank}", theme=SVG_EXPORT_THEME)


def _moments(rank: RankRehearsal) -> Table:
    table = _table(("phase", "what", "unit", "moves", "in use after", "at most", ""), right=3, last_left=True)
    before = ""
    for moment in rank.moments:
        moves = format_bytes(moment.num_bytes) if moment.num_bytes else ""
        cells = moves, format_bytes(moment.live_bytes), format_bytes(moment.highest_bytes)
        bar = _bar(moment, rank.peak_bytes)
        table.add_row("" if moment.phase == before else moment.phase, moment.what, _unit(moment), *cells, bar)
        before = moment.phase
    return table


def _bar(moment: Moment, peak_bytes: int) -> Text:
    """What is in use after a moment, by category, and behind it what it had at most; the width is the peak's."""
    bar, done = Text(), 0
    for name in CATEGORIES:
        done += moment.live_by_category.get(name, 0)
        letter, color = DRAWN[name]
        bar.append(letter * (round(BAR_CELLS * done / peak_bytes) - len(bar)), f"{color} on {color}")
    bar.append(MOST * (round(BAR_CELLS * moment.highest_bytes / peak_bytes) - len(bar)))
    return bar


def _legend(moments: Sequence[Moment]) -> Text:
    """What the letters of the bars are."""
    used = [name for name in CATEGORIES if any(moment.live_by_category.get(name) for moment in moments)]
    legend = Text("in use after: ")
    for name in used:
        letter, color = DRAWN[name]
        legend.append(letter, f"bold {color}").append(f" {name}, ")
    return legend.append(f"{MOST} at most")


def _unit(moment: Moment) -> str:
    return moment.unit + (f" x {moment.times}" if moment.times > 1 else "")


def _widest(moments: Sequence[Moment]) -> int:
    """The columns that the table takes: a row that is folded cannot be read."""
    return BESIDE_UNIT + max((len(_unit(moment)) for moment in moments), default=0)


def _ranks(told: Rehearsal) -> Table:
    table = _table(("rank", "stage", "peak", "between steps", "FLOPs", "receives", "collectives"), right=0)
    for rank in told.ranks.values():
        moved = sum(one.bytes for one in rank.collectives)
        count = sum(one.count for one in rank.collectives)
        sizes = format_bytes(rank.peak_bytes), format_bytes(rank.resting_bytes)
        table.add_row(
            str(rank.rank), str(rank.stage), *sizes, format_count(rank.flops), format_bytes(moved), str(count)
        )
    return table


def _categories(rank: RankRehearsal) -> Table:
    table = _table(("category", "bytes", "share"), right=1)
    for name, num_bytes in sorted(rank.by_category.items(), key=lambda item: -item[1]):
        table.add_row(name, format_bytes(num_bytes), f"{num_bytes / rank.peak_bytes:.0%}")
    return table


def _holdings(rank: RankRehearsal) -> Table:
    table = _table(("module", "category", "bytes"), right=2)
    for one in rank.holdings[:SHOWN]:
        table.add_row(one.module or "the model", one.category, format_bytes(one.bytes))
    if len(rank.holdings) > SHOWN:
        rest = sum(one.bytes for one in rank.holdings[SHOWN:])
        table.add_row(f"{len(rank.holdings) - SHOWN} more", "", format_bytes(rest))
    return table


def _host(told: Rehearsal) -> list[RenderableType]:
    """What waits in the host's memory, and what crosses; nothing without offload."""
    rank = max(told.ranks.values(), key=lambda rank: rank.host_peak_bytes)
    if not rank.host_peak_bytes:
        return []
    held = _table(("category", "bytes"), right=1)
    for name, num_bytes in sorted(rank.host_by_category.items(), key=lambda item: -item[1]):
        held.add_row(name, format_bytes(num_bytes))
    rate = told.host_bandwidth
    crossing = _table(("what", "to the", "times", "bytes", "at the link's rate"), right=2)
    for one in rank.transfers:
        seconds = "" if rate is None else f"{one.bytes / rate:.3g} s"
        crossing.add_row(one.what, one.to, str(one.count), format_bytes(one.bytes), seconds)
    link = "" if rate is None else f", over a link of {format_bytes(rate)}/s in each direction"
    waits = f"What waits in the host's memory for rank {rank.rank}: {format_bytes(rank.host_peak_bytes)} at most"
    crosses = f"What crosses between rank {rank.rank} and its host in a step{link}"
    return [Text(), Text(waits), held, Text(), Text(crosses), crossing]


def _collectives(found: Sequence[Collective]) -> Table:
    table = _table(("axis", "collective", "times", "bytes", "ranks", "asked for by"), right=2, last_left=True)
    largest = sorted(found, key=lambda c: -c.bytes)
    for one in largest[: 2 * SHOWN]:
        table.add_row(one.axis, one.op, str(one.count), format_bytes(one.bytes), str(one.ranks), one.line)
    if rest := largest[2 * SHOWN :]:
        times, num_bytes = sum(one.count for one in rest), sum(one.bytes for one in rest)
        table.add_row(f"{len(rest)} more", "", str(times), format_bytes(num_bytes), "", "all of them: --json")
    return table


def _findings(told: Rehearsal) -> Group | None:
    own = [f"rank {n}: {finding}" for n, rank in told.ranks.items() for finding in rank.findings]
    lines = [*(str(finding) for finding in told.findings), *own]
    return _lines(lines)


def _remedies(told: Rehearsal) -> Table | None:
    if not told.remedies:
        return None
    table = _table(("change", "peak", "saves", "margin", "fits", "step"), right=1, last_left=True)
    for remedy in told.remedies:
        if remedy.peak_bytes is None:
            table.add_row(remedy.change, "-", "-", "-", "-", remedy.because)
        else:
            saved = told.peak_bytes - remedy.peak_bytes
            sign = "" if saved >= 0 else "-"
            sizes = format_bytes(remedy.peak_bytes), sign + format_bytes(abs(saved))
            fits = "yes" if remedy.fits else "no"
            table.add_row(remedy.change, *sizes, format_bytes(remedy.margin_bytes), fits, _slower(remedy))
    return table


def _slower(remedy: Remedy) -> str:
    """`+23% (estimate)`, `+2% FLOPs`."""
    if remedy.slower is None:
        return ""
    return f"{round(100 * remedy.slower):+d}% " + ("FLOPs" if remedy.by == "FLOPs" else f"({remedy.by})")


def _lines(lines: Iterable[object]) -> Group | None:
    texts = [Text(f"  - {line}") for line in lines]
    return Group(*texts) if texts else None


def _table(headings: Sequence[str], right: int, *, last_left: bool = False) -> Table:
    """`right`: the first column that holds numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, heading in enumerate(headings):
        left = place < right or (last_left and place == len(headings) - 1)
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    return table
