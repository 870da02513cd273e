"""The traced step as work in the order in which it is done: FLOPs, messages, and waits for what is gathered."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from allranks.rehearsal import Part, Work
from allranks.rehearsed_messages import Message
from allranks.rehearsing.ledger import Stretch
from allranks.rehearsing.replay import GIVEN, Repeats, Window


def list_works(stretches: Sequence[Stretch], repeats: Repeats) -> tuple[Work, ...]:
    """The stretches in which something is done; those of a window as often as it is repeated.

    A bucket of gradients is one message although its stretch stands for several. Where blocks were left out, theirs are
    sent late in a trace, and so is all behind them: these are spread evenly over the backward from there on.
    """
    found: list[Work] = []
    late: dict[int, list[Part]] = {}
    turn, before, backward = 0, ("", 0, 0), 0
    for place, copy, ends in _in_order(len(stretches), repeats.windows):
        stretch, times = stretches[place], repeats.in_depth(stretches[place])
        now = stretch.phase, stretch.micro_step, copy
        if stretch.phase != GIVEN:
            turn, before = turn + (now != before), now
        if stretch.phase == "backward":
            backward = turn
            if times > 1:
                late.setdefault(turn, [])
        where = late.get(backward) if stretch.phase in ("backward", GIVEN) else None
        if where is not None and ends:
            where += [_part(message) for message in stretch.messages if message.once]
        parts = _parts(stretch, once=ends and where is None)
        if parts or (where is not None and times > 1):  # where late buckets are spread, also over what counts nothing
            found.append(Work(stretch.phase, stretch.block, parts, times, turn))
    for turn, buckets in late.items():
        found = list(_spread(found, turn, buckets)) if buckets else found
    return tuple(found)


def _spread(found: Sequence[Work], turn: int, late: Sequence[Part]) -> Iterator[Work]:
    """`late` over the stretches of a turn from the first one that stands for several."""
    places = [place for place, work in enumerate(found) if work.turn == turn]
    first, past = next(place for place in places if found[place].times > 1), places[-1] + 1
    units = [replace(work, times=1) for work in found[first:past] for _ in range(work.times)]
    extra: dict[int, tuple[Part, ...]] = {}
    for number, part in enumerate(late, 1):
        place = -(-number * len(units) // len(late)) - 1  # behind its share of the work
        extra[place] = (*extra.get(place, ()), part)
    yield from found[:first]
    for place, work in enumerate(units):
        yield replace(work, parts=(*work.parts, *extra.get(place, ())))
    yield from found[past:]


def _in_order(number: int, windows: Sequence[Window]) -> Iterator[tuple[int, int, bool]]:
    """(Place of a stretch, which time it is done, whether that is the last one)."""
    begins = {window.first: window for window in windows}
    place = 0
    while place < number:
        window = begins.get(place, Window(place, place + 1, 1))
        for copy in range(window.times):
            for inside in range(window.first, window.past):
                yield inside, copy, copy == window.times - 1
        place = window.past


def _parts(stretch: Stretch, *, once: bool) -> tuple[Part, ...]:
    """`once`: with the messages that are one even where the stretch is repeated."""
    found: list[Part] = []
    done = 0.0
    for after, part in _marks(stretch, once=once):
        if after > done:
            found.append(Part(flops=after - done))
            done = after
        found.append(part)
    if stretch.flops > done:
        found.append(Part(flops=stretch.flops - done))
    return tuple(found)


def _marks(stretch: Stretch, *, once: bool) -> Iterator[tuple[float, Part]]:
    """(FLOPs before it, a message or a wait), in order."""
    waits = list(stretch.waits)
    for place, message in enumerate(stretch.messages):
        while waits and waits[0][0] <= place:
            yield waits.pop(0)[1], Part()
        if message.travels and (once or not message.once):
            yield message.after, _part(message)
    for _, after in waits:
        yield after, Part()


def _part(message: Message) -> Part:
    return Part(message=(message.axis, message.op, message.num_bytes), unit=message.unit)
