"""Copies that must be alike, compared by a digest: what a bit that flipped on one rank leaves behind, and many a bug.

Whatever the layout, an Entry says which ranks hold the very same part of a tensor: parameters, buffers, the states of
optimizers, the average, the scale. Those are compared, along whichever axes. One number a rank, kind and set of such
ranks is exchanged; single tensors only where these differ. What all copies have alike is not seen: an error before the
gradients were reduced, in the data, or in the only copy.
"""

import hashlib
import socket
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, final

import torch
import torch.distributed as dist

from allranks.checkpointing.parts import tensor_digest
from allranks.data.micro_step import StepBatch
from allranks.digest import mix
from allranks.parallel.spread import Spread
from allranks.parameter_map import Entry
from allranks.stepping.alike import everyones
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.sentinel import RoundSentinel, StepSentinel
from allranks.verdict import Verdict

MASK = (1 << 64) - 1
SHOWN = 8
BUFFERS = "buffers"

Copies = Sequence[tuple[str, Entry, torch.Tensor]]
"""(kind, who it is, this rank's part) of what others hold, too."""


class HasParts(Protocol):
    """What has tensors besides model and optimizers."""

    def parts(self) -> list[tuple[Entry, torch.Tensor]]:
        """They, and who they are."""


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One part of a tensor that its holders do not have alike.

    Attributes:
        name: logical.
        holders: the global ranks that must have it alike.
        odd: those that most of the others outvote; () where there is no majority, as between two.
    """

    name: str
    holders: tuple[int, ...]
    odd: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs, by name, and the host of every rank that is concerned."""

    differences: tuple[Difference, ...]
    hosts: Mapping[int, str]


@final
class Replicas(StepSentinel, RoundSentinel):
    """Do ranks that hold the same part of something still have it alike?

    Args:
        beside: what else has tensors that are alike.
        group: all ranks.

    Attributes:
        fed_nothing: whether this rank had a forward without samples: from then on buffers are not compared.
    """

    name: ClassVar[str] = "replicas"

    def __init__(
        self,
        spread: Spread,
        optimizers: Optimizers,
        beside: Sequence[HasParts],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._spread, self._optimizers, self._beside = spread, optimizers, beside
        self._group = group
        self._alike_at = 0
        self.fed_nothing = False

    def look(self, which: str, batch: StepBatch) -> None:
        """Only hear of what is fed: a forward of no samples leaves counters behind that others have moved."""
        self.fed_nothing = self.fed_nothing or any(not micro_step.weight for micro_step in batch.micro_steps)

    def tell(self) -> dict[str, Any]:
        return {"sums": sum_copies(self._copies()), "fed_nothing": self.fed_nothing}

    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        without = BUFFERS if any(one["fed_nothing"] for one in told) else ""
        if not differ([[row for row in one["sums"] if row[0] != without] for one in told]):
            self._alike_at = step
            return None
        digests = [
            [entry.name, list(entry.holders), f"{_digest(entry, tensor) & MASK:016x}"]
            for kind, entry, tensor in self._copies()
            if kind != without
        ]
        every = everyones([socket.gethostname(), digests], self._group, self._spread.device)
        hosts = dict(enumerate(host for host, _ in every))
        return explain(Comparison(find_differences([parts for _, parts in every]), hosts), step, self._alike_at)

    def _copies(self) -> Copies:
        return [(kind, entry, tensor) for kind, entry, tensor in self._all() if len(entry.holders) > 1]

    def _all(self) -> Iterator[tuple[str, Entry, torch.Tensor]]:
        own = set(self._spread.batch_norms.own_names)
        # What is put together from time to time are parameters: each copy keeps its own of everything else.
        only_parameters = self._spread.mesh.layout.local_sgd is not None
        for name, entry in self._spread.map.items():
            if entry.alias_of is None and entry.kind == "parameter":
                yield "parameters", entry, self._spread.local(name)
            if only_parameters or entry.kind == "parameter":
                continue
            # A table that is no part of a checkpoint may be as long as the longest sequence that a rank has seen.
            if entry.alias_of is None and entry.persistent and name not in own:
                yield BUFFERS, replace(entry, name=f"buffer {name}"), self._spread.local(name)
        if only_parameters:
            return
        for other in (self._optimizers, *self._beside):
            for entry, tensor in other.parts():
                yield "states", entry, tensor


def find_differences(told: Sequence[Sequence[Sequence[Any]]]) -> tuple[Difference, ...]:
    """What differs among what the ranks tell, by rank: name, holders and digest of each of their parts."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    for rank, parts in enumerate(told):
        for name, holders, digest in parts:
            found.setdefault((name, tuple(holders)), {})[rank] = digest
    for (_, holders), digests in found.items():
        digests.update({rank: "" for rank in holders if rank not in digests})  # a state that only some have
    return tuple(
        Difference(name, holders, _outvoted(digests))
        for (name, holders), digests in found.items()
        if len(set(digests.values())) > 1
    )


def explain(found: Comparison, step: int, alike_at: int) -> Verdict:
    """Rank, tensor and step in words."""
    first = found.differences[0]
    more = len(found.differences) - 1
    also = f" (and {more} more)" if more else ""
    what = f"after step {step} {_who(first, found.hosts)}: {first.name}{also} is not alike where it has to be"
    evidence = [f"{one.name}: {_who(one, found.hosts)}" for one in found.differences[:SHOWN]]
    evidence.append(f"at step {alike_at} all were alike" if alike_at else "they have not been compared before")
    odd = sorted({rank for one in found.differences for rank in one.odd})
    where = f"{_names(odd, found.hosts)}" if odd else "the hosts of these ranks"
    good = f"a checkpoint of step {alike_at} or before" if alike_at else "the newest checkpoint"
    suspects = f"what the program changes on some ranks only, or the memory and the device of {where}"
    move = f"resume from {good}; look for {suspects}"
    return Verdict("replicas_differ", what, tuple(evidence), move)


def _who(one: Difference, hosts: Mapping[int, str]) -> str:
    if one.odd:
        others = [rank for rank in one.holders if rank not in one.odd]
        return f"{_names(one.odd, hosts)} holds other values than {_names(others, hosts)}"
    return f"{_names(one.holders, hosts)} hold different values"


def _names(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    shown = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:SHOWN])
    return f"rank {shown}" + (", ..." if len(ranks) > SHOWN else "")


def _outvoted(digests: Mapping[int, str]) -> tuple[int, ...]:
    (digest, votes), *_ = Counter(digests.values()).most_common(1)
    if 2 * votes <= len(digests):
        return ()
    return tuple(rank for rank, other in digests.items() if other != digest)


def differ(told: Sequence[Sequence[Sequence[Any]]]) -> bool:
    """Whether what the ranks tell by `sum_copies` is not alike where it has to be."""
    seen: dict[tuple[str, str], str] = {}
    return any(seen.setdefault((kind, holders), total) != total for sums in told for kind, holders, total in sums)


def sum_copies(copies: Copies) -> list[list[Any]]:
    """[kind, name of the holders, one number of all these parts], of each kind and set of holders.

    By name: every rank is told what all tell, which with n holders in each would grow with the square of n.
    """
    sums: dict[tuple[str, tuple[int, ...]], int] = {}
    for kind, entry, tensor in copies:
        # An odd key for each name: two errors cannot cancel each other by being equal.
        term = _digest(entry, tensor) * (mix(zlib.crc32(entry.name.encode())) | 1)
        sums[kind, entry.holders] = (sums.get((kind, entry.holders), 0) + term) & MASK
    return [[kind, _name_set(holders), f"{total:016x}"] for (kind, holders), total in sums.items()]


def _name_set(holders: tuple[int, ...]) -> str:
    """Short, however many they are, and the same for the same ranks alone."""
    return hashlib.blake2b(",".join(map(str, holders)).encode(), digest_size=8).hexdigest()


def _digest(entry: Entry, tensor: torch.Tensor) -> int:
    return tensor_digest(tensor, entry.box.offset)
