"""What a position in the data stands on, kept beside it: a resume under other circumstances is refused, or said."""

from collections.abc import Mapping
from typing import Any, Final

from allranks.data.stream import DataStream
from allranks.errors import CheckpointError
from allranks.verdict import Decision

WHILE_RANKS_STAY: Final = "as long as the number of data-parallel ranks and train.global_batch stay"


def circumstances(stream: DataStream) -> dict[str, int | None]:
    """What the meaning of `stream.position` may depend on; `num_samples` is None where nobody knows it, `shuffle` where
    the dataset has an order of its own.
    """
    cut = stream.cut
    sizes = {"num_samples": stream.num_samples, "num_ranks": cut.num_ranks, "global_batch": cut.global_batch}
    shuffle = stream.shuffle if stream.order == "map" else None
    return sizes | {"shuffle": shuffle, "left_out": stream.left_out.before(stream.position)}


def compare_circumstances(kept: Mapping[str, Any], position: int, stream: DataStream) -> tuple[Decision, ...]:
    """What it changes that `position` was reached under `kept`, and goes on under the stream's; a key may be missing.

    Raises:
        CheckpointError: the dataset has another length, on which the order of samples depends; it is shuffled now and
            was not before, or the other way round; or other positions before this one are left out.
    """
    before, now = kept.get("num_samples"), stream.num_samples
    if None not in (before, now) and before != now:
        raise CheckpointError(
            f"{type(stream.dataset).__name__} has {now} samples, but had {before} when the checkpoint was written, and "
            "the order of samples depends on it: bring the old data back, or start a new run "
            "(Task.model() may begin from these weights with allranks.load)"
        )
    shuffle = kept.get("shuffle")
    if shuffle is not None and stream.order == "map" and shuffle != stream.shuffle:
        raise CheckpointError(
            f"shuffle={stream.shuffle}, but the checkpoint was written with shuffle={shuffle}, and the samples before "
            f"position {position} are those of that order: give world.stream(shuffle={shuffle}), or start a new run"
        )
    left_out = kept.get("left_out") or 0
    if stream.left_out.before(position) != left_out:
        raise CheckpointError(
            f"data.skip={stream.left_out}: before position {position}, where the checkpoint was written, "
            f"{left_out} samples were left out and the others fed: leave out what comes after it, or begin from an "
            "older checkpoint"
        )
    if stream.order != "sharded" or not position:
        return ()
    num_ranks, global_batch = kept.get("num_ranks"), kept.get("global_batch")
    if num_ranks is not None and num_ranks != stream.cut.num_ranks:
        made = f"{num_ranks} data-parallel ranks have read so far, and {stream.cut.num_ranks} go on"
    elif global_batch is not None and _shares_move(global_batch, position, stream):
        made = f"train.global_batch was {global_batch}, and is {stream.cut.global_batch}"
    else:
        return ()
    because = f'{made}: with order="sharded" each sample is covered only {WHILE_RANKS_STAY}'
    return (Decision("some samples may be read twice, and others never", because),)


def _shares_move(global_batch: int, position: int, stream: DataStream) -> bool:
    """Whether ranks skip another number of samples than they have read in steps of `global_batch`."""
    now, num_ranks = stream.cut.global_batch, stream.cut.num_ranks
    return now != global_batch and bool(now % num_ranks or global_batch % num_ranks or position % now)
