"""From the stretches of a traced step to its whole: memory over time, the peak and who holds it, messages, FLOPs."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from allranks.rehearsal import CATEGORIES, Category, Holding
from allranks.rehearsed_messages import Collective, Message, Transfer
from allranks.rehearsing.ledger import Memory, Stored, Stretch
from allranks.rehearsing.places import LOSS, starred

GIVEN = "gradients that are given"
"""The stretch in which blocks that were left out get their gradients: on paper they had them from their backwards."""
ON_DEVICE: tuple[Memory, ...] = ("device",)
ON_HOST: tuple[Memory, ...] = ("pinned", "pageable")
Key = tuple[Category, str]


@final
@dataclass(frozen=True, slots=True)
class Window:
    """Stretches from place `first` to before place `past` that follow one another `times` times, all together."""

    first: int
    past: int
    times: int


@final
@dataclass(frozen=True)
class Repeats:
    """What stands for more than itself.

    Attributes:
        blocks: (phase, name of a block) -> how many it stands for.
        windows: the micro-steps that stand for others; none overlaps with another.
    """

    blocks: Mapping[tuple[str, str], int]
    windows: Sequence[Window] = ()

    def in_depth(self, stretch: Stretch) -> int:
        """How often the stretch follows itself."""
        return self.blocks.get((stretch.phase, stretch.block), 1)

    def in_number(self, stretches: Sequence[Stretch]) -> list[int]:
        """How often what travels and is computed in each of them counts."""
        times = [self.in_depth(stretch) for stretch in stretches]
        for window in self.windows:
            for place in range(window.first, window.past):
                times[place] *= window.times
        return times


@final
@dataclass(frozen=True)
class Peak:
    """The fullest moment.

    Attributes:
        num_bytes: in use; resting: between steps; by_category, holdings: of what and whose; at: when.
        levels: of each stretch (bytes at its end, the most in it).
    """

    num_bytes: int
    resting: int
    by_category: dict[str, int]
    holdings: tuple[Holding, ...]
    at: str
    levels: list[tuple[int, int]]


def find_peak(
    resting: Sequence[tuple[Stored, int]],
    stretches: Sequence[Stretch],
    repeats: Repeats,
    memories: Collection[Memory] = ON_DEVICE,
) -> Peak:
    """Follow what lies in one of `memories` through the step."""
    level = _Level(_parts((stored, num_bytes) for stored, num_bytes in resting if stored.memory in memories))
    start, levels = level.total, list[tuple[int, int]]()
    begins, ends = {w.first for w in repeats.windows}, {w.past - 1: w for w in repeats.windows}
    keyed = [
        list(_parts((stored, num_bytes) for stored, num_bytes in changes if stored.memory in memories))
        for changes in changes_on_paper(stretches, repeats)
    ]

    def follow(place: int) -> tuple[int, int]:
        times = repeats.in_depth(stretches[place]) if stretches[place].phase != GIVEN else 0
        most = level.follow(keyed[place], times, stretches[place])
        return level.total, most

    before: dict[Key, int] = {}
    for place in range(len(stretches)):
        if place in begins:
            before = dict(level.live)
        levels.append(follow(place))
        window = ends.get(place)
        if window is not None and window.times > 1:
            # Each time as much is added as before: the first time or the last one is the fullest.
            level.leap(before, window.times - 2)
            for again in range(window.first, window.past):
                follow(again)
    by_category: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for (category, _), num_bytes in level.held.items():
        by_category[category] += num_bytes
    rows = sorted(level.held.items(), key=lambda item: -item[1])
    holdings = tuple(Holding(module, category, num) for (category, module), num in rows if num > 0)
    return Peak(level.highest, start, {k: v for k, v in by_category.items() if v}, holdings, level.at, levels)


@final
class _Level:
    """What is in use, by key, and the fullest moment so far."""

    def __init__(self, resting: Iterable[tuple[Key, int, Stored]]) -> None:
        self.live: Counter[Key] = Counter()
        for key, num_bytes, _ in resting:
            self.live[key] += num_bytes
        self.total = self.highest = sum(self.live.values())
        self.at, self.held = "between steps", dict(self.live)

    def follow(self, changes: Sequence[tuple[Key, int, Stored]], times: int, stretch: Stretch) -> int:
        """Make the changes of a stretch, `times` times; the most that was in use meanwhile."""
        live, total, most = self.live, self.total, self.total
        for _ in range(times):
            for key, num_bytes, stored in changes:
                live[key] += num_bytes
                total += num_bytes
                if total > most:
                    most = total
                    if total > self.highest:
                        self.highest, self.at, self.held = total, describe(stretch, stored), dict(live)
        self.total = total
        return most

    def leap(self, before: Mapping[Key, int], times: int) -> None:
        """Add `times` times what has come since `before`."""
        for key, num_bytes in self.live.items():
            self.live[key] += times * (num_bytes - before.get(key, 0))
        self.total = sum(self.live.values())


def changes_on_paper(stretches: Sequence[Stretch], repeats: Repeats) -> list[list[tuple[Stored, int]]]:
    """The changes of each stretch, where what a repeated forward made goes as often as it was made.

    Most goes where its like is repeated, too: in the block's own forward, in the next one's, or in a backward. What
    goes later in the forward (autocast's copies of weights, whose cache ends with it) goes for all of them at once.
    """
    made: dict[int, tuple[int, int]] = {}
    found = []
    for place, stretch in enumerate(stretches):
        times = repeats.in_depth(stretch) if stretch.phase == "forward" else 1
        changes = []
        for stored, num_bytes in stretch.changes:
            before, copies = made.get(id(stored), (place, 1))
            at_once = num_bytes < 0 and stretch.phase == "forward" and place > before + 1
            changes.append((stored, num_bytes * copies if at_once else num_bytes))
            if num_bytes > 0 and times > 1:
                made[id(stored)] = (place, times)
        found.append(changes)
    _let_go(found, stretches, repeats)
    return found


def _let_go(found: list[list[tuple[Stored, int]]], stretches: Sequence[Stretch], repeats: Repeats) -> None:
    """What adds up in windows, and no other window takes away, goes with the last of its kind behind them.

    So do the messages that a schedule of several stages keeps until its end.
    """
    if not repeats.windows:
        return
    over: Counter[tuple[Memory, Key]] = Counter()
    for window in repeats.windows:
        for place in range(window.first, window.past):
            times = repeats.in_depth(stretches[place]) * (window.times - 1)
            for stored, num_bytes in found[place]:
                over[stored.memory, _key(stored)] += num_bytes * times
    for place in reversed(range(max(window.past for window in repeats.windows), len(stretches))):
        if repeats.in_depth(stretches[place]) > 1 or stretches[place].phase == GIVEN:
            continue
        for index, (stored, num_bytes) in reversed(list(enumerate(found[place]))):
            left = over[stored.memory, _key(stored)]
            if num_bytes < 0 < left:
                found[place][index] = (stored, num_bytes - left)
                over[stored.memory, _key(stored)] = 0


def describe(stretch: Stretch, made: Stored) -> str:
    """`backward of layers.3`, `update`: where in the step it is that something is made.

    A stretch goes on until the next block begins: what is made behind the last one (the head, the loss, and the loss's
    own backward) says itself whose it is.
    """
    if stretch.phase not in ("forward", "backward"):
        return stretch.phase
    place = stretch.block or "the model"
    own = made.category in (None, "logits") and made.module
    if made.module == LOSS and own:
        place = "the loss"
    elif own and stretch.block and not f"{made.module}.".startswith(f"{stretch.block}."):
        place = made.module
    return f"{'backward' if made.in_backward else stretch.phase} of {place}"


def add_messages(stretches: Sequence[Stretch], repeats: Repeats) -> tuple[Collective, ...]:
    """Messages of a kind together."""
    count: Counter[tuple[str, str, int, str, str]] = Counter()
    sizes: Counter[tuple[str, str, int, str, str]] = Counter()
    for message, times in _messages(stretches, repeats):
        key = (message.axis, message.op, message.ranks, message.line, message.members)
        count[key] += times
        sizes[key] += message.num_bytes * times
    return tuple(
        Collective(axis, op, sizes[key], n, ranks, line, members)
        for key, n in count.items()
        for axis, op, ranks, line, members in [key]
    )


def _messages(stretches: Sequence[Stretch], repeats: Repeats) -> Iterator[tuple[Message, int]]:
    for stretch, times in zip(stretches, repeats.in_number(stretches), strict=True):
        for message in (message for message in stretch.messages if message.travels):
            yield message, 1 if message.once else times


def add_transfers(stretches: Sequence[Stretch], repeats: Repeats) -> tuple[Transfer, ...]:
    """What crosses between device and host, by kind and direction."""
    count: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for stretch, times in zip(stretches, repeats.in_number(stretches), strict=True):
        for what, to, num_bytes in stretch.transfers:
            count[what, to] += times
            sizes[what, to] += num_bytes * times
    return tuple(Transfer(what, to, sizes[what, to], number) for (what, to), number in sorted(count.items()))


def add_flops(stretches: Sequence[Stretch], repeats: Repeats) -> float:
    """Of the whole step."""
    return sum(one.flops * times for one, times in zip(stretches, repeats.in_number(stretches), strict=True))


def category_of(stored: Stored) -> Category:
    """What nobody has named is what the user's operators make, on the device; on the host the update does."""
    return stored.category or ("other" if stored.memory in ON_HOST else "activations")


def _parts(changes: Iterable[tuple[Stored, int]]) -> Iterator[tuple[Key, int, Stored]]:
    """What each module has of each change: as it was added, so it is taken away."""
    for stored, num_bytes in changes:
        left, whole = num_bytes, sum(stored.shares.values())
        for module, share in stored.shares.items() if whole else ():
            part = abs(num_bytes) * share // whole * (1 if num_bytes > 0 else -1)
            left -= part
            yield (category_of(stored), starred(module)), part, stored
        yield _key(stored), left, stored


def _key(stored: Stored) -> Key:
    return category_of(stored), starred(stored.module)
