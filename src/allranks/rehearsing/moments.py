"""The step unit by unit, with the memory at each: gathered, computed, dropped, reduced.

What a unit does is seen by `parallel/step_record`, as in `allranks train --show-sharding`; the memory is the ledger's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from allranks.parallel.replica_twin import ReplicaTwin
from allranks.parallel.spread import Spread
from allranks.parallel.step_record import BUCKET, Deed
from allranks.rehearsal import CATEGORIES, Category, Moment
from allranks.rehearsing.ledger import Ledger, Stored, Stretch
from allranks.rehearsing.replay import GIVEN, Repeats, category_of, changes_on_paper
from allranks.rehearsing.shortening import Shortened


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
    resting: Sequence[tuple[Stored, int]],
    stretches: Sequence[Stretch],
    repeats: Repeats,
    homes: Mapping[str, str] | None = None,
) -> tuple[Moment, ...]:
    """In order; what follows in several messages for one unit is one, and blocks that were left out are counted.

    Args:
        homes: of DDP's buckets, see `homes_of_buckets`.
    """
    held: Counter[Category] = Counter()
    for kept, num_bytes in resting:
        if kept.memory == "device":
            held[category_of(kept)] += num_bytes
    live = held.total()
    rows: list[_Row] = [_Row(Deed("start", "begin", "the step"), live, live, 1, 0, dict(held))]
    begins, ends = {w.first for w in repeats.windows}, {w.past - 1: w.times for w in repeats.windows}
    before = held.copy()
    settled = _settle(stretches, repeats, homes or {})
    for number, (stretch, changes) in enumerate(zip(stretches, changes_on_paper(stretches, repeats), strict=True)):
        first = len(rows)
        before = held.copy() if number in begins else before
        for copy in range(repeats.in_depth(stretch) if stretch.phase != GIVEN else 0):
            row = len(rows) - 1  # what comes before the first deed is of the last one, in a copy of this stretch's
            deeds = list(settled[number])
            for place, (stored, num_bytes) in enumerate([*changes, (None, 0)]):
                while deeds and deeds[0][0] <= place:
                    rows[row].by_category = dict(held)  # as it ends
                    row = first + len(settled[number]) - len(deeds)
                    deed = deeds.pop(0)[1]
                    if not copy:
                        times = 1 if deed.unit.startswith(BUCKET.strip()) else repeats.in_depth(stretch)
                        rows.append(_Row(deed, live, live, times, deed.num_bytes, {}))
                if stored is not None and stored.memory == "device":
                    held[category_of(stored)] += num_bytes
                    live += num_bytes
                rows[row].live, rows[row].highest = live, max(rows[row].highest, live)
            rows[row].by_category = dict(held)
        for category in held:  # micro-steps that are not drawn
            held[category] += (ends.get(number, 1) - 1) * (held[category] - before[category])
        live = held.total()
    return tuple(_moment(row) for row in _joined(rows))


def homes_of_buckets(spread: Spread, shortened: Shortened) -> dict[str, str]:
    """Bucket of DDP, as a Deed names it -> the block whose backward fills it, "" for what is around the blocks.

    A block that was left out is the one behind it that was traced: that stands for it in the backward.
    """
    found: dict[str, str] = {}
    for which, module in spread.modules.items():
        for number, name in enumerate(module.last_in_buckets if isinstance(module, ReplicaTwin) else (), 1):
            path = f"{which}.{name}".removeprefix(".")
            places = [place for place, block in enumerate(shortened.blocks) if path.startswith(f"{block}.")]
            behind = shortened.blocks[places[0] :] if places else ()
            found[f"{BUCKET}{number}"] = next((one for one in behind if one not in shortened.left_out), "")
    return found


def _settle(stretches: Sequence[Stretch], repeats: Repeats, homes: Mapping[str, str]) -> list[list[tuple[int, Deed]]]:
    """The deeds of each stretch, with buckets of gradients there where they are full.

    Where blocks were left out, theirs are full at the end of a trace alone, and so are all behind them. Those of what
    one block stands for are one deed.
    """
    settled = [list(stretch.deeds) for stretch in stretches]
    if not homes or not repeats.blocks:
        return settled
    places = {stretch.block: place for place, stretch in enumerate(stretches) if stretch.phase == "backward"}
    buckets: dict[int, list[Deed]] = {}
    for place, deeds in enumerate(settled):
        for one in list(deeds):
            block = homes.get(one[1].unit)
            if not block or block not in places:  # a block without a backward fills none
                continue
            home = places[block]
            late = home != place or deeds.index(one) > _past(deeds, stretches[home].block)
            if late or repeats.in_depth(stretches[home]) > 1:
                deeds.remove(one)
                buckets.setdefault(home, []).append(one[1])
    for place, some in buckets.items():
        deeds = settled[place]
        index = _past(deeds, stretches[place].block)
        changes = deeds[index][0] if index < len(deeds) else len(stretches[place].changes)
        deeds.insert(index, (changes, _together(some)))
    return settled


def _past(deeds: Sequence[tuple[int, Deed]], block: str) -> int:
    """Where in a stretch that begins with `block` something else is computed."""
    others = (index for index, (_, deed) in enumerate(deeds) if deed.what == "compute" and deed.unit != block)
    return next(others, len(deeds))


def _together(buckets: Sequence[Deed]) -> Deed:
    first, last = buckets[0], buckets[-1]
    if len(buckets) == 1:
        return first
    unit = f"{BUCKET.strip()}s {first.unit.removeprefix(BUCKET)} to {last.unit.removeprefix(BUCKET)}"
    return Deed(first.phase, first.what, unit, sum(one.num_bytes for one in buckets))


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
        elif last is not None and last.times <= row.times and row.deed.replaces(last.deed):
            row.highest = max(last.highest, row.highest)
            found[-1] = row
        else:
            found.append(row)
    return found
