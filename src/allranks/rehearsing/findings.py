"""What a rehearsal finds that would have failed on the cluster, or hung there, or wasted memory."""

from collections.abc import Mapping, Sequence

from allranks.parallel.spread import Spread
from allranks.rehearsal import Finding, RankRehearsal
from allranks.rehearsed_messages import Message
from allranks.units import format_bytes

LARGE_BYTES = 1 << 20
"""What is smaller may lie whole on every rank."""


def unsharded(spread: Spread) -> list[Finding]:
    """Parameters that every rank of a cut layout holds whole."""
    layout = spread.mesh.layout
    found = []
    for name, entry in spread.map.items():
        tensor = spread.tensors[name]
        if entry.kind != "parameter" or entry.alias_of is not None or tensor.is_meta:
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < LARGE_BYTES or entry.sharded:
            continue
        if layout.fully_sharded and layout.dp_shard > 1:
            what = f"{name} ({list(entry.shape)}) lies whole on each of dp_shard={layout.dp_shard} ranks"
            found.append(
                Finding("unsharded", what, "make it a parameter of a module that FSDP gathers (at least 1 dim)")
            )
        elif layout.tp > 1 and not layout.fully_sharded:
            what = f"{name} ({list(entry.shape)}) lies whole on each of tp={layout.tp} ranks"
            found.append(
                Finding("unsharded", what, 'name its module in hints().tensor ("colwise", "rowwise", "vocab")')
            )
    return found


def without_gradient(names: Sequence[str]) -> list[Finding]:
    """Parameters that the step's loss does not reach."""
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    what = f"{names[0]}{more} get no gradient"
    return [
        Finding(
            "no gradient", what, "leave them out of the model, freeze them, or name their modules in hints().optional"
        )
    ]


def compare_ranks(ranks: Mapping[int, RankRehearsal]) -> list[Finding]:
    """Ranks of one stage have to execute one sequence of collectives; in a group of the user's own, its members."""
    found: list[Finding] = []
    by_stage: dict[int, list[RankRehearsal]] = {}
    for told in ranks.values():
        by_stage.setdefault(told.stage, []).append(told)
    for peers in by_stage.values():
        first = peers[0]
        found += filter(None, (_compare(first, other) for other in peers[1:]))
        groups = dict.fromkeys(message.only for told in peers for message in told.sequence if message.only)
        for only in groups:
            members = [told for told in peers if told.rank in only]
            if first not in members:
                found += filter(None, (_compare(members[0], other, only) for other in members[1:]))
    return found


def _compare(one: RankRehearsal, other: RankRehearsal, only: tuple[int, ...] | None = None) -> Finding | None:
    """`only`: look at the calls of this group alone; None: at all that both ranks have to execute."""
    ways = [_common(told, other.rank if told is one else one.rank, only) for told in (one, other)]
    pairs = list(zip(*ways, strict=False))
    place = next((i for i, (a, b) in enumerate(pairs) if not _agree(a, b)), None)
    if place is None and len(ways[0]) == len(ways[1]):
        return None
    place = len(pairs) if place is None else place
    mine, theirs = (_say(way[place] if place < len(way) else None) for way in ways)
    among = "" if only is None else f" of the group {list(only)}"
    what = (
        f"ranks {one.rank} and {other.rank} part at collective {place + 1}{among} of the step: rank {one.rank} "
        f"executes {mine}, rank {other.rank} {theirs}; the run would hang there"
    )
    advice = "let model, loss and data take the same way on every rank: nothing in them may depend on the rank"
    return Finding("hang", what, advice, fails=True)


def _common(told: RankRehearsal, with_rank: int, only: tuple[int, ...] | None) -> list[Message]:
    """The collectives of a rank that another one has to execute, too."""
    if only is not None:
        return [message for message in told.sequence if message.only == only]
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
