"""Every `guard.digest_every` steps: are copies of the parameters still alike, and if not, whose is at fault."""

from collections.abc import Mapping, Sequence
from typing import final

from allranks.stepping.replicas import Comparison, Difference, compare_replicas
from allranks.stepping.session import Session
from allranks.verdict import Verdict

SHOWN = 8


@final
class Replicas:
    """Compares them for a training."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._every = session.config.guard.digest_every
        self._alike_at = session.stream.step

    def due(self, step: int) -> bool:
        """Whether `step` steps are a time to compare; not while the copies of local_sgd are apart."""
        if not self._every or step % self._every or self._session.processes.size == 1:
            return False
        return self._session.outer is None or not self._session.outer.apart

    def compare(self, step: int) -> Verdict | None:
        """What ends the run after step `step`; None where all are alike. Collective."""
        found = compare_replicas(self._session.spread, self._session.processes.world_group)
        if found is None:
            self._alike_at = step
            return None
        return explain(found, step, self._alike_at)


def explain(found: Comparison, step: int, alike_at: int) -> Verdict:
    """Rank, tensor and step in words."""
    first = found.differences[0]
    more = len(found.differences) - 1
    also = f" (and {more} more)" if more else ""
    what = (
        f"after step {step} {_who(first, found.hosts)}: {first.name}{also} is not alike where it has to be; "
        f"the run ends, and nothing is saved"
    )
    evidence = [f"{one.name}: {_who(one, found.hosts)}" for one in found.differences[:SHOWN]]
    evidence.append(f"at step {alike_at} all were alike, or the run started there")
    odd = sorted({rank for one in found.differences for rank in one.odd})
    where = f"{_names(odd, found.hosts)}" if odd else "the hosts of these ranks"
    move = f"resume from a checkpoint of step {alike_at} or before; have the memory and the device of {where} checked"
    return Verdict("replicas_differ", what, tuple(evidence), move)


def _who(one: Difference, hosts: Mapping[int, str]) -> str:
    if one.odd:
        others = [rank for rank in one.holders if rank not in one.odd]
        return f"{_names(one.odd, hosts)} holds other values than {_names(others, hosts)}"
    return f"{_names(one.holders, hosts)} hold different values"


def _names(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    shown = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:SHOWN])
    return f"rank {shown}" + (", ..." if len(ranks) > SHOWN else "")
