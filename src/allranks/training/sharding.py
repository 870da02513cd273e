"""`allranks train --show-sharding`: one real step of the user's model, recorded on every rank."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, final

from allranks.data.micro_step import StepBatch
from allranks.errors import DataError
from allranks.launching.environment import read_environment
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import choose_device, start, stop
from allranks.parallel.blocks import search_blocks
from allranks.parallel.step_record import Deed, StepRecord
from allranks.request import TrainRequest
from allranks.stepping.session import Session, assemble
from allranks.stepping.world import gather_processes
from allranks.training.prepare import prepare, resolve_layout

BACKEND_TIMEOUT_SECONDS = 600.0
UNSEEN = 2


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One deed of a step, as rank 0 does it.

    Attributes:
        phase, what, unit: as in Deed.
        bytes_per_rank: that rank 0 receives (of a "send": sends, of a "drop": frees).
        bytes_total: that all ranks receive together; None where their steps are unlike (stages of a pipeline).
    """

    phase: str
    what: str
    unit: str
    bytes_per_rank: int
    bytes_total: int | None

    def to_json(self) -> dict[str, object]:
        """Its fields."""
        return asdict(self)


def record_here(request: TrainRequest, reply: Connection) -> int:
    """Run in each process: assemble as training does, make three steps, and send what the last one did."""
    environment = read_environment(os.environ)
    prepared = prepare(request)
    layout = resolve_layout(prepared.config, environment.world_size, environment.num_nodes)
    choice = choose_device(environment, request.device, prepared.config.train.backend, layout)
    choice = start(environment, choice, timeout_seconds=BACKEND_TIMEOUT_SECONDS)
    try:
        processes = gather_processes(environment, choice, layout)
        session = assemble(prepared.task, prepared.config, processes, Stopwatch(), lambda: (False, False))
        deeds, micro_steps = record_step(session, prepared.task.hints().blocks)
        told = {"deeds": [deed.to_json() for deed in deeds], "micro_steps": micro_steps}
        reply.send_bytes(json.dumps(told).encode())
    finally:
        stop()
    return 0


def record_step(session: Session, patterns: Sequence[str] = ()) -> tuple[list[Deed], int]:
    """(what this rank does in the last micro-step of a step and in its update, micro-steps of a step); collective.

    Two steps are made unseen: DDP orders its buckets anew after the first. All feed the first batch.

    Args:
        patterns: `hints().blocks`, which say what the units are where FSDP has none.

    Raises:
        DataError: there is no batch.
    """
    spread = session.spread
    blocks = search_blocks({which: spread.bare(which) for which in spread.modules}, patterns)
    names = [f"{which}.{name}" if which else name for which in blocks for name in blocks[which]]
    record = StepRecord(spread, (session.processes.agreement,), blocks=names)
    synchronise = spread.synchronise

    def begin_last(last: bool) -> None:
        synchronise(last)
        if last:
            record.forget()

    with session.loader() as loader:
        batch: StepBatch | None = next(loader, None)
    if batch is None:
        raise DataError("there is no batch to make a step of")
    again = batch
    before = session.step.agree_first(again)
    for _ in range(UNSEEN):
        before = session.step.run(again, before, lambda: again).pending
    spread.synchronise = begin_last  # type: ignore[method-assign]
    try:
        with record.recording():
            session.step.run(again, before, lambda: again)
    finally:
        del spread.synchronise
    return record.deeds, len(again.micro_steps)


def merge(ranks: Sequence[Sequence[Deed]]) -> list[Row]:
    """Rank 0's deeds, with what all ranks receive where each does the same."""
    kinds = [[(deed.phase, deed.what, deed.unit) for deed in deeds] for deeds in ranks]
    alike = all(kind == kinds[0] for kind in kinds)
    return [
        Row(
            deed.phase,
            deed.what,
            deed.unit,
            deed.num_bytes,
            sum(deeds[index].num_bytes for deeds in ranks) if alike else None,
        )
        for index, deed in enumerate(ranks[0])
    ]


def read_replies(replies: Sequence[bytes]) -> tuple[list[Row], int]:
    """(rows, micro-steps of a step) of what the ranks have sent, in their order."""
    told: list[dict[str, Any]] = [json.loads(reply) for reply in replies]
    return merge([[Deed(**deed) for deed in one["deeds"]] for one in told]), int(told[0]["micro_steps"])
