"""The step unit by unit, with the memory at each: gathered, computed, dropped, reduced.

What a unit does is seen by `parallel/step_record`, as in `allranks train --show-sharding`; the memory is the ledger's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from allranks.parallel.step_record import Deed
from allranks.rehearsal import Moment
from allranks.rehearsing.ledger import Ledger, Stored, Stretch
from allranks.rehearsing.replay import GIVEN, Repeats, changes_on_paper


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


def list_moments(
    resting: Sequence[tuple[Stored, int]], stretches: Sequence[Stretch], repeats: Repeats
) -> tuple[Moment, ...]:
    """In order; what follows in several messages for one unit is one, and blocks that were left out are counted."""
    live = sum(num_bytes for stored, num_bytes in resting if stored.memory == "device")
    rows: list[_Row] = [_Row(Deed("start", "begin", "the step"), live, live, 1, 0)]
    begins, ends = {w.first for w in repeats.windows}, {w.past - 1: w.times for w in repeats.windows}
    before = live
    for number, (stretch, changes) in enumerate(zip(stretches, changes_on_paper(stretches, repeats), strict=True)):
        first = len(rows)
        before = live if number in begins else before
        for copy in range(repeats.in_depth(stretch) if stretch.phase != GIVEN else 0):
            row = first - 1
            deeds = list(stretch.deeds)
            for place, (stored, num_bytes) in enumerate([*changes, (None, 0)]):
                while deeds and deeds[0][0] <= place:
                    deed = deeds.pop(0)[1]
                    row += 1
                    if not copy:
                        rows.append(_Row(deed, live, live, repeats.in_depth(stretch), deed.num_bytes))
                live += num_bytes if stored is None or stored.memory == "device" else 0
                rows[row].live, rows[row].highest = live, max(rows[row].highest, live)
        live += (ends.get(number, 1) - 1) * (live - before)  # micro-steps that are not drawn
    return tuple(
        Moment(row.deed.phase, row.deed.what, row.deed.unit, row.num_bytes, row.live, row.highest, row.times)
        for row in _joined(rows)
    )


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
        else:
            found.append(row)
    return found
