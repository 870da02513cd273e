"""Whether all ranks of a rehearsal execute the collectives that others wait for: what does not is a hang found early.

Five comparisons:

    within a stage       ranks have to make one sequence of calls, whatever the groups are
    across stages        of a group whose members run several stages (the world, groups of the user's own, what a
                         pipeline sums over its stages) the members have to make one sequence of calls on that group
    between groups       two stages must not wait for each other, each in another such group
    before what is sent  a stage must not wait, before it sends anything on, for one that comes there only with it
    what is sent         a rank has to receive from another one what that sends to it
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, product, starmap

from allranks.rehearsal import Finding, RankRehearsal
from allranks.rehearsed_messages import Message
from allranks.rehearsing.groups import list_members
from allranks.units import format_bytes

Group = tuple[int, ...]

_ALIKE = "let model, loss and data take the same way on every rank: nothing in them may depend on the rank"
_OF_A_STAGE = (
    "the last stage alone runs the loss, and each stage its own blocks: call there only groups whose ranks are of one "
    "stage"
)


def compare_ranks(ranks: Mapping[int, RankRehearsal]) -> list[Finding]:
    """Where two of the rehearsed ranks would wait for each other for ever."""
    by_stage: dict[int, list[RankRehearsal]] = {}
    for told in ranks.values():
        by_stage.setdefault(told.stage, []).append(told)
    found = [one for peers in by_stage.values() for one in _compare_peers(peers)]
    found += _compare_stages([by_stage[stage] for stage in sorted(by_stage)], parted=bool(found))
    return found or _compare_sent(ranks)


def _compare_peers(peers: Sequence[RankRehearsal]) -> list[Finding]:
    """Ranks of one stage: all that they call; of a group of the user's own, its members."""
    first = peers[0]
    found = [_compare(first, other) for other in peers[1:]]
    groups = dict.fromkeys(message.only for told in peers for message in told.sequence if message.only)
    for group in groups:
        members = [told for told in peers if told.rank in group]
        if first not in members:
            found += [_compare(members[0], other, group) for other in members[1:]]
    return [one for one in found if one is not None]


def _compare_stages(stages: Sequence[Sequence[RankRehearsal]], *, parted: bool) -> list[Finding]:
    """Of each group over several stages one member a stage: those of one stage are compared already.

    Args:
        parted: those of one stage part, so that who waits for whom between groups follows from that.
    """
    everyone = [told for peers in stages for told in peers]
    groups = dict.fromkeys(message.across for told in everyone for message in told.sequence if message.across)
    found: list[Finding | None] = []
    for group in groups:
        inside = ([told for told in peers if told.rank in group] for peers in stages)
        first, *others = (members[0] for members in inside if members)
        found += [_compare(first, other, group) or _find_stall(first, other, group) for other in others]
    if len(groups) > 1 and not parted and not any(found):
        pairs = (product(early, late) for early, late in combinations(stages, 2))
        found += [next(filter(None, starmap(_find_crossed, some)), None) for some in pairs]
    return [one for one in found if one is not None]


def _compare_sent(ranks: Mapping[int, RankRehearsal]) -> list[Finding]:
    """What one rank sends to another one against what that receives: as many, each of one size and type, in order.

    The user's own are compared in `exchanges`. Ranks that were traced with other micro-steps cannot be compared; nor
    can stages in what their own blocks send, of which each may have left out some.
    """
    ways: defaultdict[tuple[int, int], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for told in ranks.values():
        for message in told.sequence:
            peer = message.peer
            if peer is not None and not message.own and peer in ranks and peer != told.rank:
                ends = (told.rank, peer) if message.op == "send" else (peer, told.rank)
                ways[ends][message.op != "send"].append(message)
    found = []
    for (sender, receiver), both in sorted(ways.items()):
        one, other = ranks[sender], ranks[receiver]
        alike = one.stage == other.stage
        sent, received = ([message for message in way if alike or message.axis == "pp"] for way in both)
        if one.traced_micro_steps == other.traced_micro_steps and (what := _find_unlike(sent, received)):
            between = f"rank {sender} (stage {one.stage}) and rank {receiver} (stage {other.stage})"
            fails = not all(message.axis == "pp" for message in (*sent, *received))
            found.append(Finding("sent", f"{between} do not agree on what is sent: {what}", _ALIKE, fails=fails))
    return found


def _find_unlike(sent: Sequence[Message], received: Sequence[Message]) -> str:
    """Where what arrives is not what leaves, in words; "" where it is."""
    for number, (one, other) in enumerate(zip(sent, received, strict=False), 1):
        if (one.num_bytes, one.terms) != (other.num_bytes, other.terms):
            return f"message {number} leaves as {_say(one)} and is expected as {_say(other)}"
    if len(sent) == len(received):
        return ""
    return f"{len(sent)} messages leave, and {len(received)} are expected"


def _compare(one: RankRehearsal, other: RankRehearsal, group: Group | None = None) -> Finding | None:
    """`group`: look at the calls of this one alone; None: at all that both ranks have to execute."""
    ways = [_common(told, other.rank if told is one else one.rank, group) for told in (one, other)]
    pairs = list(zip(*ways, strict=False))
    place = next((i for i, (a, b) in enumerate(pairs) if not _agree(a, b)), None)
    if place is None and len(ways[0]) == len(ways[1]):
        return None
    place = len(pairs) if place is None else place
    mine, theirs = (_say(way[place] if place < len(way) else None) for way in ways)
    among = "" if group is None else f" of the group {list_members(group)}"
    stages = "" if one.stage == other.stage else f" (stages {one.stage} and {other.stage} of the pipeline)"
    what = (
        f"ranks {one.rank} and {other.rank}{stages} part at collective {place + 1}{among} of the step: rank {one.rank} "
        f"executes {mine}, rank {other.rank} {theirs}; the run would hang there"
    )
    return Finding("hang", what, _OF_A_STAGE if stages else _ALIKE, fails=True)


def _find_stall(early: RankRehearsal, late: RankRehearsal, group: Group) -> Finding | None:
    """Both make the same calls on `group`, `early` before it has sent anything and `late` after it has received.

    The first that a pipeline's later stage receives goes back to the first that each earlier stage sends, in every
    schedule: a micro-step enters at the first stage.
    """
    sent, received = _place_of(early, "send"), _place_of(late, "receive")
    if sent is None or received is None or early.sequence[sent].members != late.sequence[received].members:
        return None  # of two pipelines
    come = len([message for message in late.sequence[:received] if message.across == group])
    calls = [message for message in early.sequence[:sent] if message.across == group]
    waits = next((message for message in calls[come:] if message.waits), None)
    if waits is None:
        return None
    what = (
        f"rank {early.rank} (stage {early.stage} of the pipeline) waits in {_say(waits)} for rank {late.rank}, which "
        f"comes there only with what rank {early.rank} sends afterwards; the run would hang there"
    )
    return Finding("hang", what, _OF_A_STAGE, fails=True)


def _find_crossed(one: RankRehearsal, other: RankRehearsal) -> Finding | None:
    """Both make as many calls on each group of both, and come to where each waits for the other in another one."""
    ways = _shared_calls(one, other.rank), _shared_calls(other, one.rank)
    called: tuple[Counter[Group], Counter[Group]] = (Counter(), Counter())
    places, before = [0, 0], [-1, -1]
    while places != before:
        before = list(places)
        for me, way in enumerate(ways):
            places[me] = _go_on(way, places[me], called[me], called[1 - me])
    if any(place == len(way) for place, way in zip(places, ways, strict=True)):
        return None
    mine, theirs = (_say(way[place][0]) for place, way in zip(places, ways, strict=True))
    what = (
        f"ranks {one.rank} and {other.rank} (stages {one.stage} and {other.stage} of the pipeline) wait for each "
        f"other: rank {one.rank} in {mine}, rank {other.rank} in {theirs}; the run would hang there"
    )
    return Finding("hang", what, "call groups that two stages share in one order on both", fails=True)


def _shared_calls(told: RankRehearsal, with_rank: int) -> list[tuple[Message, int]]:
    """What a rank calls on groups over several stages that another rank is in, and which call on its group each is."""
    calls = [message for message in told.sequence if with_rank in message.across]
    numbers: Counter[Group] = Counter()
    numbered = []
    for message in calls:
        numbers[message.across] += 1
        numbered.append((message, numbers[message.across]))
    return numbered


def _go_on(way: Sequence[tuple[Message, int]], place: int, called: Counter[Group], by_other: Counter[Group]) -> int:
    """How far a rank comes that has come to `place`, until it waits; keeps in `called` what it has called by then."""
    for message, number in way[place:]:
        called[message.across] = number
        if message.waits and by_other[message.across] < number:
            return place
        place += 1
    return place


def _place_of(told: RankRehearsal, op: str) -> int | None:
    """Where the rank first sends to, or receives from, another stage."""
    of_stages = ("pp", op, False)
    ops = (i for i, one in enumerate(told.sequence) if (one.axis, one.op, one.own) == of_stages)
    return next(ops, None)


def _common(told: RankRehearsal, with_rank: int, group: Group | None) -> list[Message]:
    """The collectives of a rank that another one has to execute, too."""
    if group is not None:
        return [message for message in told.sequence if group in (message.only, message.across)]
    return [message for message in told.sequence if not message.only or with_rank in message.only]


def _agree(one: Message, other: Message) -> bool:
    """Whether they can be one collective; in a group of both ranks even parts are of one size, too."""
    if (one.axis, one.op, one.terms) != (other.axis, other.op, other.terms):
        return False
    return one.uneven or one.members != other.members or one.even_bytes == other.even_bytes


def _say(message: Message | None) -> str:
    if message is None:
        return "none"
    of = [f"{message.terms}, {format_bytes(message.num_bytes)}"] if message.travels else []
    return f"{message.op} over {message.axis} ({', '.join([*of, f'asked for by {message.line}'])})"
