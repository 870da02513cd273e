"""Whether what the user's own code sends is received, and what it waits for is sent: a hang found before it happens.

    message by message   what one rank sends another has to be received there, in the order of their group and tag, in
                         its type and size
    all together         no ranks may wait in a circle, each in a send, a receive or a collective of which another one
                         comes later

gloo's blocking send returns when the receive is there, whatever its size. A receive that is larger than what comes
keeps the rest, a smaller one ends the process, and another type takes the bytes as they are (torch 2.13).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

from allranks.rehearsal import Finding, RankRehearsal
from allranks.rehearsed_messages import ANY_RANK, Message
from allranks.rehearsing.groups import is_member, list_members
from allranks.units import format_bytes

Ranks = Mapping[int, RankRehearsal]

_BOTH_ENDS = "let both ranks ask the same question before they send and receive, with one group and one tag"
_ALIKE = "receive into a tensor of the type and size that is sent"
_AT_ONCE = "let one of them receive before it sends, or let all begin at once with dist.batch_isend_irecv"
MOST_NAMED = 8
"""Ranks that a line of advice writes out."""


@final
class Route(NamedTuple):
    """A way that messages keep their order on: of one group (its members), from one rank to one other, of one tag."""

    members: str
    sender: int
    receiver: int
    tag: int


def compare_exchanges(ranks: Ranks) -> list[Finding]:
    """Messages between two rehearsed ranks of which one end is missing, or another one than it should be."""
    found = []
    for route in sorted({route for told in ranks.values() for route in _routes_of(told)}):
        if not _is_compared(ranks, route):
            continue
        sent, received = _on(ranks[route.sender], route, "send"), _on(ranks[route.receiver], route, "receive")
        pairs = zip(sent, received, strict=False)
        unlike = next((pair for pair in pairs if not _alike(*pair)), None)
        if unlike is not None:
            found.append(_unlike(route, *unlike))
        elif len(sent) != len(received):
            found.append(_lonely(route, sent, received))
    return found


def find_circle(ranks: Ranks) -> Finding | None:
    """Ranks that wait for each other, played through; for ranks whose sequences and messages fit together."""
    if not any(message.own for told in ranks.values() for message in told.sequence):
        return None
    ways = {rank: list(_list_calls(ranks, told)) for rank, told in ranks.items()}
    places, called = dict.fromkeys(ranks, 0), {rank: Counter[object]() for rank in ranks}
    before: dict[int, int] = {}
    while places != before:
        before = dict(places)
        for rank, way in ways.items():
            places[rank] = _go_on(rank, way, places[rank], called)
    stuck = {rank: way[places[rank]] for rank, way in ways.items() if places[rank] < len(way)}
    circle = _circle(stuck, called)
    if not any(stuck[rank].message.own for rank in circle):
        return None  # of collectives alone, which are compared elsewhere
    inside = ", ".join(f"rank {rank} in {_say(stuck[rank].message)}" for rank in circle)
    what = f"ranks {_and(circle)} wait for each other: {inside}; the run would hang there"
    return Finding("hang", what, _AT_ONCE, fails=True)


def list_unmatched(ranks: Ranks) -> list[str]:
    """What is sent or received with an other end that nobody has compared, one line for each line of code."""
    return [_tell(ranks, op, line, ends) for (op, line), ends in _by_line(ranks).items() if ends]


def next_peer(ranks: Ranks) -> int | None:
    """A rank whose rehearsal would show the other end of a line's messages, where none of it was seen."""
    for (op, line), ends in _by_line(ranks).items():
        whole = [
            one
            for told in ranks.values()
            for one in told.sequence
            if (one.op, one.line) == (op, line) and one.peer in ranks
        ]
        missing = [message.peer for _, message in ends if message.peer not in (None, ANY_RANK, *ranks)]
        if missing and not whole:
            return missing[0]
    return None


class _Call(NamedTuple):
    """`name`: the same on all ranks that it waits for: `others`; number: which of that name it is."""

    message: Message
    name: object
    number: int
    others: Mapping[int, object]


def _list_calls(ranks: Ranks, told: RankRehearsal) -> Iterator[_Call]:
    """What a rank does with other rehearsed ones: its sends and receives, and collectives within its stage."""
    numbers: Counter[object] = Counter()
    for message in told.sequence:
        name: object = message.members
        others: Mapping[int, object] = {
            rank: name
            for rank, other in ranks.items()
            if other.stage == told.stage and is_member(rank, message.members) and rank != told.rank
        }
        if message.op in ("send", "receive"):
            if not message.own or not _is_compared(ranks, route := _route(told.rank, message)):
                continue
            assert message.peer is not None
            ends = ("receive", route), ("send", route)
            name, other_end = ends if message.op == "receive" else ends[::-1]
            others = {message.peer: other_end}
        numbers[name] += 1
        yield _Call(message, name, numbers[name], others)


def _go_on(rank: int, way: Sequence[_Call], place: int, called: Mapping[int, Counter[object]]) -> int:
    """How far a rank comes that has come to `place`, until it waits; keeps what it has called by then."""
    for call in way[place:]:
        called[rank][call.name] = call.number
        if call.message.waits and _missing(call, called) is not None:
            return place
        place += 1
    return place


def _missing(call: _Call, called: Mapping[int, Counter[object]]) -> int | None:
    """A rank that has not come to its end of the call."""
    return next((rank for rank, name in call.others.items() if called[rank][name] < call.number), None)


def _circle(stuck: Mapping[int, _Call], called: Mapping[int, Counter[object]]) -> list[int]:
    """Ranks each of which waits for the next one, and the last for the first; none where that ends elsewhere."""
    seen: list[int] = []
    rank = next(iter(stuck), None)
    while rank in stuck and rank not in seen:
        assert rank is not None
        seen.append(rank)
        rank = _missing(stuck[rank], called)
    return sorted(seen[seen.index(rank) :]) if rank is not None and rank in seen else []


def _routes_of(told: RankRehearsal) -> Iterator[Route]:
    for message in told.sequence:
        if message.own and message.peer != ANY_RANK:
            yield _route(told.rank, message)


def _route(rank: int, message: Message) -> Route:
    peer = ANY_RANK if message.peer is None else message.peer
    ends = (rank, peer) if message.op == "send" else (peer, rank)
    return Route(message.members, *ends, message.tag)


def _on(told: RankRehearsal, route: Route, op: str) -> list[Message]:
    own = (message for message in told.sequence if message.own and message.op == op)
    return [message for message in own if _route(told.rank, message) == route]


def _is_compared(ranks: Ranks, route: Route) -> bool:
    """Whether both ends were rehearsed, whole enough to be counted, and the receiver takes nothing from anyone."""
    ends = [ranks[rank] for rank in (route.sender, route.receiver) if rank in ranks]
    if len(ends) < 2 or (_cut_apart(*ends)):
        return False
    of_any = (route.members, ANY_RANK, route.tag)
    return not any((message.members, message.peer, message.tag) == of_any for message in ranks[route.receiver].sequence)


def _cut_apart(one: RankRehearsal, other: RankRehearsal) -> bool:
    """Whether they run different stages, of which as many blocks were left out as each has too many, or were traced
    with other micro-steps.
    """
    if one.traced_micro_steps != other.traced_micro_steps:
        return True
    return one.stage != other.stage and any(told.traced < told.blocks for told in (one, other))


def _alike(sent: Message, received: Message) -> bool:
    return (sent.terms, sent.num_bytes) == (received.terms, received.num_bytes)


def _unlike(route: Route, sent: Message, received: Message) -> Finding:
    smaller = received.num_bytes < sent.num_bytes
    end = "the process would end there" if smaller else "it would hold other numbers than were sent"
    if not smaller and sent.terms == received.terms:
        end = "over gloo only its first part would be what was sent, and for NCCL it is no receive of that"
    what = (
        f"rank {route.sender} sends rank {route.receiver} {_size(sent)} ({_asked(sent)}), which receives "
        f"{_size(received)} ({_asked(received)}): {end}"
    )
    return Finding("message", what, _ALIKE, fails=True)


def _lonely(route: Route, sent: Sequence[Message], received: Sequence[Message]) -> Finding:
    more, few = (sent, received) if len(sent) > len(received) else (received, sent)
    lonely, times = more[len(few)], f"{len(sent)} times" if len(sent) != 1 else "once"
    heard = f"{len(received)} times" if len(received) != 1 else "once"
    what = (
        f"rank {route.sender} sends to rank {route.receiver} {times} in the step, and rank {route.receiver} receives "
        f"from it {heard}{_under(route)}: {_say(lonely)} has no other end; the run would hang "
        f"{'there' if lonely.waits else 'where that is waited for'}"
    )
    return Finding("hang", what, _BOTH_ENDS, fails=True)


def _under(route: Route) -> str:
    """Of the tag, where it is one: messages with another one are others."""
    return f" with tag {route.tag}" if route.tag else ""


def _by_line(ranks: Ranks) -> dict[tuple[str, str], list[tuple[int, Message]]]:
    """Of each (op, line) of the user's, what was not compared: (rank, message), each pair of ranks once."""
    found: dict[tuple[str, str], list[tuple[int, Message]]] = {}
    for rank, told in ranks.items():
        for message in told.sequence:
            if not message.own:
                continue
            ends = found.setdefault((message.op, message.line), [])
            compared = message.peer != ANY_RANK and _is_compared(ranks, _route(rank, message))
            if not compared and not any((rank, message.peer) == (one, other.peer) for one, other in ends):
                ends.append((rank, message))
    return found


def _tell(ranks: Ranks, op: str, line: str, ends: Sequence[tuple[int, Message]]) -> str:
    told = sorted({rank for rank, _ in ends})
    peers = sorted({message.peer for _, message in ends if message.peer is not None})
    to, what = ("to", "is received there") if op == "send" else ("from", "is sent there")
    if peers[0] == ANY_RANK:
        return f"{line}: {_name(told)} {op}s from any rank: whether one sends what it takes"
    away = [peer for peer in peers if peer not in ranks]
    said = f"{line}: {_name(told)} {op}s {to} {_name(peers)}: whether it {what}"
    if away:
        both = sorted({*told, *away})
        return f"{said} (--ranks {','.join(map(str, both)) if len(both) <= MOST_NAMED else 'all'})"
    cut = any(_cut_apart(ranks[one], ranks[peer]) for one in told for peer in peers)
    return f"{said} (--full-trace)" if cut else f"{said}, which receives from any rank, too"


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {list_members(ranks)}"


def _and(ranks: Iterable[int]) -> str:
    *others, last = map(str, ranks)
    return f"{', '.join(others)} and {last}" if others else last


def _size(message: Message) -> str:
    return f"{message.terms}, {format_bytes(message.num_bytes)}"


def _asked(message: Message) -> str:
    return f"asked for by {message.line}"


def _say(message: Message) -> str:
    if not message.own:
        return f"{message.op} over {message.axis} ({_asked(message)})"
    to = "to" if message.op == "send" else "from"
    return f"{message.op} {to} rank {message.peer} ({_size(message)}, {_asked(message)})"
