"""The process group of an own loop's processes, in which nothing is waited for without end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from allranks.errors import ProcessError
from allranks.parallel.ended_groups import destroy_groups
from allranks.units import format_seconds

TIMEOUT = timedelta(seconds=60)  # what one rank waits for and the other never sends ends in an error
LATEST = timedelta(minutes=10)  # so does a rank that stands still or works alone so long after another has ended


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """(rank, world size) in a gloo world as the environment has it; the program's own start of one does nothing."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with (
        patch.object(dist, "init_process_group", lambda *args, **options: None),
        patch.object(dist, "destroy_process_group", lambda *args, **options: None),
    ):
        yield rank, size
    _end_together(rank, size)
    destroy_groups()


def _end_together(rank: int, size: int) -> None:
    """Wait until all ranks have come to their end. By the store: what gloo itself waits for has the group's limit.

    Raises ProcessError: some have not.
    """
    store = PrefixStore("own-loop-has-ended", dist.distributed_c10d._get_default_store())
    store.set(str(rank), "")
    try:
        store.wait([str(other) for other in range(size)], LATEST)
    except dist.DistStoreError as error:
        late = [str(other) for other in range(size) if not store.check([str(other)])]
        seconds = format_seconds(LATEST.total_seconds())
        raise ProcessError(
            f"rank {rank} came to its end, and {seconds} later rank {', '.join(late)} had not: it waits for something "
            "without end, or works alone; look at what depends on the rank behind the last step"
        ) from error
