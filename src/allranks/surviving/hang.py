"""The hang verdict: from where every rank stands to who is in the way of whom, of what kind, and what to do. Pure.

kind         is said where
stopped      the kernel shows a rank as stopped
data         a rank loads its data while the others wait
disk         a rank writes a checkpoint, or the kernel shows it waiting for a disk
divergence   ranks wait in different collectives, or in the same one with other shapes; two receive from each other, or
             both send
dead_peer    ranks wait for one that is no longer there
straggler    ranks wait for one that is in code of its own
network      all ranks of a group wait in the same collective, or for one whose host says nothing
stuck        nobody waits for anybody
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from allranks.observing.heartbeat import Phase
from allranks.surviving.evidence import SHOWN_FRAMES, Collective, Testimony
from allranks.surviving.kernel import STOPPED
from allranks.surviving.monitor import LIMITS, Alarm
from allranks.units import format_seconds
from allranks.verdict import Verdict

Kind = Literal["stopped", "data", "disk", "divergence", "dead_peer", "straggler", "network", "stuck"]
PULSE_LATE_SECONDS = 5.0

_DOING: Mapping[Phase, str] = {
    "input": "loading data",
    "step": "in a step",
    "compilation": "compiling (torch.compile)",
    "checkpoint": "saving",
    "evaluation": "evaluating",
}
SHOWN_RANKS = 16  # more stacks than that nobody reads

NEXT: dict[Kind, str] = {
    "stopped": "`kill -CONT {pid}` lets it go on; see who stopped it (a debugger, a scheduler, a frozen container)",
    "data": "look at {place} and at what it reads (a share, a lock, a queue); guard.input_seconds says how long to"
    " wait",
    "disk": "look at the disk or share behind the run's directory (`df`, `dmesg`); guard.checkpoint_seconds says how"
    " long to wait",
    "divergence": "let every rank make the same calls in the same order: compare the lines above, and what depends on"
    " the rank in them",
    "dead_peer": "see why that process ended: the logs of its host, `dmesg` there",
    "straggler": "look at {place}: it waits for something, or computes for longer than any step before;"
    " guard.{limit} says how long to wait",
    "network": "see whether the ranks reach each other (firewall, interface, switch): `allranks doctor` on each host;"
    " over NCCL a GPU that still computes looks the same (nvidia-smi)",
    "stuck": "look at {place}; guard.{limit} says how long to wait",
}


@final
@dataclass(frozen=True, slots=True)
class Cause:
    """Who is in the way, how, and in words."""

    kind: Kind
    ranks: tuple[int, ...]
    words: str


@final
@dataclass(frozen=True, slots=True)
class Absentee:
    """A rank of one of several hosts of which there is no testimony.

    Attributes:
        host, pid: its host, and the process of that host's command.
        ended: whether that host has said that it is not there any more; else it has said nothing.
    """

    host: str
    pid: int
    ended: bool


Absent = Mapping[int, Absentee]  # by rank
ALL_HERE: Absent = {}


def diagnose(
    found: Sequence[Testimony], alarm: Alarm, follows: str, absent: Absent = ALL_HERE
) -> tuple[Verdict, tuple[int, ...]]:
    """Say what hangs, and which ranks are in the way.

    Args:
        found: of every rank that could be looked at.
        alarm: what the monitor saw.
        follows: what happens now, in words.
        absent: of several hosts: all other ranks.
    """
    cause = find_cause(found, alarm, absent)
    step = max((one.row.step for one in found), default=0)
    quiet = min((one.row.quiet_seconds for one in found), default=0.0)
    first = next((one for one in found if one.row.rank in cause.ranks), None)
    move = NEXT[cause.kind].format(
        pid="" if first is None else first.row.pid,
        place="the stacks" if first is None else first.place or "its log",
        limit="hang_seconds" if first is None else LIMITS.get(first.row.phase, "hang_seconds"),
    )
    what = f"no progress for {format_seconds(quiet)} after step {step}: {cause.words}"
    shown = sorted(found, key=lambda one: one.row.rank not in cause.ranks)[:SHOWN_RANKS]
    lines = [line for one in found if one in shown for line in describe(one)]
    if len(found) > len(shown):
        lines.append(f"{len(found) - len(shown)} ranks more are not shown")
    evidence = (*lines, follows)
    return Verdict(cause.kind, what, evidence, move), cause.ranks


def find_cause(found: Sequence[Testimony], alarm: Alarm, absent: Absent = ALL_HERE) -> Cause:
    """Who is in the way of whom."""
    hosts = {one.row.rank: one.host for one in found} | {rank: one.host for rank, one in absent.items()}
    stopped = alarm.ranks if alarm.kind == "stopped" else _stopped(found)
    if stopped:
        return Cause(
            "stopped", stopped, f"{name_ranks(stopped, hosts)} stopped by a signal (SIGSTOP), a debugger or a freezer"
        )
    by_rank = {one.row.rank: one for one in found}
    waits = {rank: one.waits_in for rank, one in by_rank.items() if one.waits_in is not None}
    free = tuple(rank for rank in by_rank if rank not in waits)
    awaited = {rank: absent_from(own, by_rank) for rank, own in waits.items()}
    missing = sorted({rank for ranks in awaited.values() for rank in ranks if rank not in by_rank})
    gone = tuple(rank for rank in missing if rank not in absent or absent[rank].ended)
    if gone:
        return Cause("dead_peer", gone, f"{name_ranks(gone, hosts)} not there any more, and waited for")
    pair = never_meet(found)
    if waits and (not free or pair is not None):
        cause = _compare(waits, hosts, pair)
        if cause.kind == "divergence" or not missing:
            return cause
        return Cause("network", tuple(missing), f"{name_ranks(missing, hosts)} waited for, and that host says nothing")
    late = tuple(rank for rank in free if by_rank[rank].row.quiet_seconds > alarm.limit_seconds / 2)
    return _find_occupied(by_rank, late or free or alarm.ranks, hosts, waited_for=bool(waits))


def never_meet(found: Sequence[Testimony]) -> tuple[int, int] | None:
    """Two ranks that wait in the same place of one group's order of collectives, and in different ones: then the
    program has parted, however long its steps are. Who is further than another may only be faster.
    """
    seen: dict[tuple[str, tuple[int, ...], int], tuple[int, Collective]] = {}
    for one in found:
        own = one.waits_in
        if own is not None and not own.p2p:
            rank, first = seen.setdefault((own.group, own.ranks, own.seq), (one.row.rank, own))
            if not _fit(first, own):
                return rank, one.row.rank
    return None


def _stopped(found: Sequence[Testimony]) -> tuple[int, ...]:
    return tuple(one.row.rank for one in found if one.row.state in STOPPED)


def _find_occupied(
    by_rank: Mapping[int, Testimony], ranks: Sequence[int], hosts: Mapping[int, str], *, waited_for: bool
) -> Cause:
    """Ranks that wait in no collective: what they do instead."""
    others = ", and the others wait for it" if waited_for else ""
    loading = tuple(rank for rank in ranks if by_rank[rank].row.phase == "input")
    if loading:
        return Cause("data", loading, f"{name_ranks(loading, hosts)} still loading data{others}")
    writing = tuple(rank for rank in ranks if by_rank[rank].row.phase == "checkpoint" or by_rank[rank].row.state == "D")
    if writing:
        where = _where(by_rank[writing[0]])
        return Cause("disk", writing, f"{name_ranks(writing, hosts)} waiting for a disk{where}{others}")
    where = _where(by_rank[ranks[0]]) if ranks else ""
    kind: Kind = "straggler" if waited_for else "stuck"
    return Cause(kind, tuple(ranks), f"{name_ranks(ranks, hosts)} busy{where}{others}")


def _where(one: Testimony) -> str:
    return f" at {one.place}" if one.place is not None else ""


def absent_from(own: Collective, by_rank: Mapping[int, Testimony]) -> list[int]:
    """The ranks of its group that have not come to this collective, as far as can be known."""
    if own.p2p:
        return [rank for rank in own.ranks if rank not in by_rank]
    return [rank for rank in own.ranks if rank not in by_rank or not _has_come(own, by_rank[rank])]


def _has_come(own: Collective, other: Testimony) -> bool:
    return any(theirs.group == own.group and theirs.seq >= own.seq for theirs in other.collectives)


def _compare(waits: Mapping[int, Collective], hosts: Mapping[int, str], parted: tuple[int, int] | None) -> Cause:
    """Every rank waits in a collective, or two are known to have parted: in the same one?"""
    ranks = sorted(waits)
    first = waits[ranks[0]]
    if opposed := _opposed(waits):
        one, other = (f"rank {_name(rank, hosts)} waits in {waits[rank]}" for rank in opposed)
        return Cause("divergence", opposed, f"{one}, {other}: both go the same way, and never meet")
    pair = parted or next(((ranks[0], rank) for rank in ranks[1:] if not _fit(first, waits[rank])), None)
    if pair is not None:
        one, other = (_name(rank, hosts) for rank in pair)
        words = f"rank {one} waits in {waits[pair[0]]}, rank {other} in {waits[pair[1]]}: they never meet"
        return Cause("divergence", pair, words)
    return Cause("network", tuple(ranks), f"all ranks wait in {first}, which does not come through")


_ALONE = re.compile(r"(?P<way>send|recv) (?P<own>\d+)(?:->|<-)(?P<peer>\d+)")
"""A send or receive by itself, as NCCL's recorder names it, with ranks of its group; gloo's has none, a batch several.
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, send and recv.)
"""


def _opposed(waits: Mapping[int, Collective]) -> tuple[int, int] | None:
    """Two ranks of which each receives from the other, or sends to it: what goes between two ranks keeps its order, so
    that neither comes to what the other waits for.

    Of more than two in a circle that cannot be told: what a rank does with other peers goes on beside it.
    """
    seen: dict[tuple[str, str, str, str], int] = {}
    for rank in sorted(waits):
        own = waits[rank]
        if own.p2p and (named := _ALONE.fullmatch(own.name)):
            way, here, there = named["way"], named["own"], named["peer"]
            if (other := seen.get((own.group, way, there, here))) is not None:
                return other, rank
            seen[own.group, way, here, there] = rank
    return None


def _fit(one: Collective, other: Collective) -> bool:
    if one.p2p and other.p2p:
        return True  # whether a send of one is the receive of the other is told where it is plain (`_opposed`)
    if one.group != other.group and not set(one.ranks) & set(other.ranks):
        return True  # the same axis elsewhere
    same = (one.group, one.seq, one.name) == (other.group, other.seq, other.name)
    return same and (one.sizes == other.sizes or one.name != "all_reduce")


def describe(one: Testimony) -> list[str]:
    """One rank, in lines: how it is, what it waits for, where it stands."""
    row = one.row
    state = {"T": "stopped", "t": "stopped", "D": "waiting for a disk", "R": "computing"}.get(row.state[:1], "waiting")
    doing = _DOING.get(row.phase, f"in its {row.phase}")
    name, quiet = _name(row.rank, {row.rank: one.host}), format_seconds(row.quiet_seconds)
    lines = [f"rank {name} (pid {row.pid}, {state}): {doing} for {quiet}, step {row.step} done"]
    if row.pulse_seconds is not None and row.pulse_seconds > PULSE_LATE_SECONDS and row.state not in STOPPED:
        since = format_seconds(row.pulse_seconds)
        lines.append(f"  no thread of its Python has run for {since}: compiled code holds Python's lock")
    waits = one.waits_in
    last = waits or max(one.collectives, key=lambda theirs: theirs.seq, default=None)
    if last is not None:
        lines.append(f"  {'waits in' if waits else 'last ended'} {last}")
    if one.stack:
        shown = one.stack[:SHOWN_FRAMES]
        lines += [f"  {frame}" for frame in shown]
    else:
        lines.append("  no stack: it could not answer")
    return lines


def name_ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """`rank 1 is`, `ranks 0, 2 are`; `rank 1 on node-2 is` where there are several hosts."""
    names = ", ".join(_name(rank, hosts) for rank in ranks)
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"


def _name(rank: int, hosts: Mapping[int, str]) -> str:
    host = hosts.get(rank)
    return f"{rank} on {host}" if host else str(rank)
