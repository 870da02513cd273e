"""Workers as the monitor sees them, made up."""

from dataclasses import replace
from typing import Any

from allranks.surviving.evidence import Collective, Frame, Testimony
from allranks.surviving.monitor import Row

FINE = Row(
    rank=0,
    pid=100,
    state="S",
    phase="step",
    quiet_seconds=0.1,
    pulse_seconds=0.2,
    step=12,
    first_seconds=0.5,
    longest_seconds=0.1,
)


def row(rank: int, **changes: Any) -> Row:
    """A worker that is fine, but for `changes`."""
    return replace(FINE, rank=rank, pid=100 + rank, **changes)


def collective(seq: int, *, waits: bool = True, **changes: Any) -> Collective:
    """An all-reduce over two ranks."""
    made = Collective("1", "dp_shard", (0, 1), "all_reduce", seq, False, ((4,),), waits)
    return replace(made, **changes)


def witness(rank: int, *collectives: Collective, file: str = "/home/me/task.py", **changes: Any) -> Testimony:
    """What such a worker says: it stands in the user's file."""
    seen = row(rank, **{"quiet_seconds": 20.0, **changes})
    return Testimony(seen, (Frame(file, 31, "loss"),), collectives)
