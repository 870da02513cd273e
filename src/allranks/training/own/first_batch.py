"""Where an own loop begins, or finds that there is nothing left to begin with."""

from allranks.data.loader import Loader
from allranks.data.micro_step import StepBatch
from allranks.data.stream import DataStream
from allranks.stepping.alike import on_any_rank
from allranks.stepping.world import Processes


def first_batch(loader: Loader, order: DataStream, processes: Processes) -> StepBatch | None:
    """This rank's part of the first step; None on every rank where there is none; collective where data shards itself.

    Behind its end a shard gives fillers without end, for other ranks may have more. Where all have ended, as in a run
    that was done before, a step of nobody's samples would still move the parameters, and count.
    """
    batch = next(loader, None)
    if batch is None or order.order != "sharded":
        return batch
    return batch if on_any_rank(batch.local_size > 0, processes.device, processes.world_group) else None
