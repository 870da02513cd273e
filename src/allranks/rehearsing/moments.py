"""The step unit by unit, with the memory at each: gathered, computed, dropped, reduced.

What a unit does is seen by `parallel/step_record`, as in `allranks train --show-sharding`; the memory is the ledger's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from allranks.parallel.step_record import Deed
from allranks.rehearsal import CATEGORIES, Category, Moment
from allranks.rehearsing.ledger import Ledger, Stored, Stretch
from allranks.rehearsing.replay import GIVEN, Repeats, category_of, changes_on_paper


def note_deed(ledger: Ledger, deed: Deed) -> None:
    """Write down that `deed` begins now."""
    if ledger.now is not None:
        ledger.now.deeds.append((len(ledger.now.changes), deed))


@final
@dataclass(slots=True)
class _Row:
    deed: Deed
    live: int
    highest: int
    times: int
    num_bytes: int
    by_category: Mapping[Category, int]


def list_moments(
    resting: Sequence[tuple[Stored, int]], stretches: Sequence[Stretch], repeats: Repeats
) -> tuple[Moment, ...]:
    """In order; what follows in several messages for one unit is one, and blocks that were left out are counted."""
    held: Counter[Category] = Counter()
    for kept, num_bytes in resting:
        if kept.memory == "device":
            held[category_of(kept)] += num_bytes
    live = held.total()
    rows: list[_Row] = [_Row(Deed("start", "begin", "the step"), live, live, 1, 0, dict(held))]
    begins, ends = {w.first for w in repeats.windows}, {w.past - 1: w.times for w in repeats.windows}
    before = held.copy()
    for number, (stretch, changes) in enumerate(zip(stretches, changes_on_paper(stretches, repeats), strict=True)):
        first = len(rows)
        before = held.copy() if number in begins else before
        for copy in range(repeats.in_depth(stretch) if stretch.phase != GIVEN else 0):
            row = len(rows) - 1  # what comes before the first deed is of the last one, in a copy of this stretch's
            deeds = list(stretch.deeds)
            for place, (stored, num_bytes) in enumerate([*changes, (None, 0)]):
                while deeds and deeds[0][0] <= place:
                    rows[row].by_category = dict(held)  # as it ends
                    row = first + len(stretch.deeds) - len(deeds)
                    deed = deeds.pop(0)[1]
                    if not copy:
                        rows.append(_Row(deed, live, live, repeats.in_depth(stretch), deed.num_bytes, {}))
                if stored is not None and stored.memory == "device":
                    held[category_of(stored)] += num_bytes
                    live += num_bytes
                rows[row].live, rows[row].highest = live, max(rows[row].highest, live)
            rows[row].by_category = dict(held)
        for category in held:  # micro-steps that are not drawn
            held[category] += (ends.get(number, 1) - 1) * (held[category] - before[category])
        live = held.total()
    return tuple(_moment(row) for row in _joined(rows))


def _moment(row: _Row) -> Moment:
    deed, held = row.deed, {name: row.by_category[name] for name in CATEGORIES if row.by_category.get(name)}
    return Moment(deed.phase, deed.what, deed.unit, row.num_bytes, row.live, row.highest, row.times, held)


def _joined(rows: Sequence[_Row]) -> list[_Row]:
    found: list[_Row] = []
    for row in rows:
        last = found[-1] if found else None
        same = last is not None and (last.deed.phase, last.deed.what, last.deed.unit, last.times) == (
            row.deed.phase,
            row.deed.what,
            row.deed.unit,
            row.times,
        )
        if last is not None and same:
            last.num_bytes += row.num_bytes
            last.live, last.highest = row.live, max(last.highest, row.highest)
            last.by_category = row.by_category
        else:
            found.append(row)
    return found
