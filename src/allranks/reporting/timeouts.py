"""NCCL's timeouts, of one log or of a run's: which ranks waited in which collective of which group, and who did not.

torch's watchdog prints one line where a collective has waited too long, and then one that names the group
(ProcessGroupNCCL.cpp of torch 2.4 to 2.13):

    [rank5]:[E...] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, ...)
    [rank5]:[E...] [PG ID 2 PG GUID 3(mesh_tp) Rank 1]  failure detected by watchdog at work sequence id: 41 PG ...

`[rank5]` is the rank of the job; every later one is the place in the group, which is all that torch before 2.2 prints.
No line says how many ranks a group or the job has: who is missing behind the last one seen, nobody knows from a log.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from allranks.reporting.signatures import E1

MAX_KEPT = 64  # of a rank
NAMED_RANKS = 16
ALONE = "died or stands in code of its own"

_RANK = re.compile(r"\[rank(\d{1,6})\]")
_PLACE = re.compile(r"\[Rank (\d{1,6})\] Watchdog caught")
_GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?(\w+)(?:\(([^()]*)\))? Rank \d+\]")
_WORK = re.compile(r"detected by watchdog at work(?: sequence id)?: (\d+)")

Call = tuple[str, str, str]
"""Number in its group, operation and values, as the line has them."""


@final
@dataclass(frozen=True, slots=True)
class Group:
    """A process group: the name that all of its ranks know it by, and what it is called; "" where no line says so."""

    name: str = ""
    title: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is that of all ranks of the job."""
        return self.title == "default_pg"


@final
@dataclass(frozen=True, slots=True)
class Timeout:
    """One rank's wait: its rank in the job, its place in the group, and the call."""

    rank: int
    place: int
    call: Call
    group: Group = Group()


@final
@dataclass(frozen=True, slots=True)
class Job:
    """What a Run tells beside its logs.

    Attributes:
        num_ranks: of the newest attempt.
        left: ranks that came to an end of their own: if they had waited, that would stand in the logs.
        excused: ranks that another one's end has ended.
    """

    num_ranks: int
    left: frozenset[int]
    excused: frozenset[int] = frozenset()


@final
class Timeouts:
    """Collects the timeouts of one log, or of several in turn; of equal ones of a rank one."""

    def __init__(self) -> None:
        self._of_ranks: dict[int, dict[Call, Timeout]] = {}
        self._of_places: dict[int, dict[Call, Timeout]] = {}

    def passing(self, lines: Iterable[str]) -> Iterator[str]:
        """The same lines, read on their way."""
        for line in lines:
            if "atchdog" in line:
                self._read(line)
            yield line

    def newest(self) -> list[Timeout]:
        """The last of each rank in each group, by rank.

        Where some lines have ranks of the job, those that have places alone say the same once more.
        """
        found = self._of_ranks or self._of_places
        last = {(rank, one.group): one for rank, calls in sorted(found.items()) for one in calls.values()}
        return list(last.values())

    def _read(self, line: str) -> None:
        rank, group = _RANK.search(line), _GROUP.search(line)
        named = Group(group[1], group[2] or "") if group else Group()
        if (call := E1.regex.search(line)) is not None:
            place = _PLACE.search(line)
            if (first := rank or place) is not None:
                known = self._of_places if rank is None else self._of_ranks
                where = int(first[1]), int((place or first)[1])
                _note(known, Timeout(*where, (call[1], call[2], call[3]), named))
        elif rank is not None and (work := _WORK.search(line)) is not None:
            for one in list(self._of_ranks.get(int(rank[1]), {}).values()):
                if one.call[0] == work[1] and not one.group.name:
                    _note(self._of_ranks, replace(one, group=named))


def _note(found: dict[int, dict[Call, Timeout]], one: Timeout) -> None:
    """As the last one of its rank; what it lacks of a name an equal one before it has."""
    calls = found.setdefault(one.rank, {})
    before = calls.pop(one.call, one)
    calls[one.call] = one if one.group.name else replace(one, group=before.group)
    if len(calls) > MAX_KEPT:
        calls.pop(next(iter(calls)))


def compare(found: Sequence[Timeout], job: Job | None = None) -> tuple[str, str] | None:
    """What is wrong and what to do next, of timeouts by rank; None where they say no more together than each alone.

    Args:
        job: of which the timeouts are; None: nobody knows what ranks there are beside them.
    """
    if not found or (len({one.rank for one in found}) < 2 and job is None):
        return None
    groups: dict[Group, list[Timeout]] = {}
    for one in found:
        groups.setdefault(one.group, []).append(one)
    seen = {one.rank for one in found}
    for group in groups.values():
        if _spacing(group) is not None and not _are_alike(group):
            return _parted(group)
    for group in groups.values():
        if missing := sorted(_missing(group, job) - seen):
            return f"{_waited(group[0])}: {_name(missing)} did not come", f"{_name(missing)} {ALONE}: look at the log"
    only = next(iter(groups.values()))
    if len(groups) == 1 and _are_alike(only) and (only[0].group.name or _spacing(only) is not None):
        return _alike(only, job)
    return _in_several(list(groups.values()))


def _are_alike(group: Sequence[Timeout]) -> bool:
    return len({one.call for one in group}) == 1


def _spacing(group: Sequence[Timeout]) -> tuple[int, int] | None:
    """(rank of place 0, ranks from one place to the next), where all of them agree.

    None where they do not: then the lines are of several groups, or of one without an order.
    """
    first, last = group[0], group[-1]
    start, step = 0, 1
    if first.group.name and not first.group.whole:
        step = (last.rank - first.rank) // max(1, last.place - first.place)
        start = first.rank - step * first.place
    fits = step >= 1 and start >= 0 and all(one.rank == start + step * one.place for one in group)
    return (start, step) if fits else None


def _is_regular(group: Sequence[Timeout]) -> bool:
    """Whether the spacing is more than a guess: two members fit any line, and 0, 4 and 8 one of 0, 1, 4, 5, 8 and 9.

    So a part of the job's ranks needs three, of which two are neighbours.
    """
    if group[0].group.whole or not group[0].group.name:
        return True
    return len(group) > 2 and any(after.place - before.place == 1 for before, after in pairwise(group))


def _missing(group: Sequence[Timeout], job: Job | None) -> set[int]:
    """Ranks that belong to the group and are not seen in it: between those that are, or, where a Run tells, at all."""
    spacing = _spacing(group)
    if spacing is None or not _is_regular(group):
        return set()
    start, step = spacing
    places = range(group[0].place, group[-1].place + 1)
    if job is not None and group[0].group.whole:
        places = range(job.num_ranks)
    members = {start + step * place for place in places}
    return members if job is None else (members & job.left) - job.excused


def _parted(group: Sequence[Timeout]) -> tuple[str, str]:
    calls = ", ".join(f"rank {one.rank} in {one.call[1]} number {one.call[0]}" for one in group[:NAMED_RANKS])
    return (
        f"the ranks waited in different collectives{_of(group[0].group)}: {calls}",
        "find the first call that is not made by all ranks alike: something in it depends on the rank or its data",
    )


def _alike(group: Sequence[Timeout], job: Job | None) -> tuple[str, str]:
    """All that are seen wait in the same call: what that says depends on whether there are others."""
    ranks = [one.rank for one in group]
    usual = "the same call everywhere: look at network and GPUs (`allranks doctor`)"
    if group[0].call[2] == "1":
        usual = "one value: a barrier, a metric or an early stop; see who makes it, and when"
    if job is None:
        return (
            f"{_waited(group[0])}: {_name(ranks)}, all that this log has, alike",
            f"if the job has other ranks (behind the last one, on other nodes), look at their logs first: one that "
            f"does not wait there {ALONE}; else {usual}",
        )
    others = sorted(set(range(job.num_ranks)) - set(ranks) - job.excused)
    if not others:
        return f"{_waited(group[0])}: all ranks alike", usual
    terminal = " (rank 0 prints to the terminal)" if others[0] == 0 else ""
    return (
        f"{_waited(group[0])}: {_name(ranks)} alike; the logs here have no such wait of {_name(others)}",
        f"look first at what {_name(others)} last did{terminal}: one that has a part in this collective and does not "
        f"wait there {ALONE}, one that was ended with the others may have waited, too; else {usual}",
    )


def _in_several(groups: Sequence[Sequence[Timeout]]) -> tuple[str, str]:
    """Of ranks that wait in several groups, or in ones that no line tells apart, nobody is accused."""
    calls = "; ".join(
        f"{_name([one.rank for one in group])} in {' and '.join(sorted({one.call[1] for one in group}))}"
        f"{_of(group[0].group)}"
        for group in groups[:NAMED_RANKS]
    )
    return (
        f"NCCL waited in vain in several groups of processes: {calls}",
        f"compare number, operation and size within each group; a rank that waits in none, also one without a line in "
        f"this log, {ALONE}; where all wait, look for two groups whose collectives some ranks call in another order",
    )


def _waited(one: Timeout) -> str:
    return E1.what.format("", *one.call) + _of(one.group)


def _of(group: Group) -> str:
    return "" if not group.name or group.whole else f" of group {group.title or group.name}"


def _name(ranks: Sequence[int]) -> str:
    """`rank 7`, `ranks 8 to 15`, or each of them, as far as there is room."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"ranks {', '.join(map(str, ranks[:NAMED_RANKS]))}{more}"
