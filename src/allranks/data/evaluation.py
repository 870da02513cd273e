"""Exact evaluation: every sample once and none twice over any number of ranks, and as many forwards on each."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import default_collate

from allranks.data.cut import Cut
from allranks.data.loader import CountTargets, Loader
from allranks.data.micro_step import MicroStep
from allranks.data.random_keys import evaluation_seed
from allranks.data.stream import DataStream, declared_order
from allranks.data.worker_process import Collate
from allranks.errors import DataError


def evaluation_batches(
    dataset: Any,
    *,
    batch_size: int,
    num_ranks: int = 1,
    dp_rank: int = 0,
    micro_batch: int | None = None,
    seed: int = 0,
    collate: Collate = default_collate,
    workers: int = 0,
    count_targets: CountTargets | None = None,
    draws: bool = True,
    pin: bool = False,
) -> Iterator[MicroStep]:
    """This rank's forwards of one evaluation, in the dataset's own order, with weight-0 fillers where it has no sample.

    `batch_size` samples at a time (at least one a rank) are shared out over `num_ranks`, at most `micro_batch` of them
    in a forward. An item that draws random numbers draws the same ones in every evaluation. The dataset may be smaller
    than a batch, or than the number of ranks. The other arguments are the Loader's.

    Raises:
        DataError: at once, for an empty dataset or one that shards itself.
    """
    if declared_order(dataset) == "sharded":
        raise DataError(
            f'{type(dataset).__name__} declares order="sharded", so nobody knows whether each sample is counted once: '
            'for evaluation return a map-style dataset, or an iterable one with `order = "global"`'
        )
    if batch_size > 0:  # Cut refuses the rest
        batch_size = max(batch_size, num_ranks)
    cut = Cut(batch_size, num_ranks, micro_batch)
    stream = DataStream(
        dataset, cut=cut, dp_rank=dp_rank, seed=evaluation_seed(seed), epochs=1, shuffle=False, allow_small=True
    )
    loader = Loader(stream, collate=collate, workers=workers, count_targets=count_targets, draws=draws, pin=pin)
    return _forwards(loader)


def _forwards(loader: Loader) -> Iterator[MicroStep]:
    with loader:
        for step in loader:
            yield from step.micro_steps
