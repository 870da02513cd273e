"""Which of the workers that are there train: as many as layout and global batch take; the others wait as spares."""

from collections.abc import Sequence

from allranks.config import Config
from allranks.errors import AllranksError, LayoutError
from allranks.training.prepare import resolve_layout


def seat_workers(config: Config, workers: Sequence[int]) -> tuple[int, ...]:
    """How many workers of each host train: together the largest world that the config takes, the first hosts first.

    A host has all of its workers in that world or none, but for the last one of it, which may leave some idle. With
    `hsdp`, which makes a copy on every host, all have all of theirs, and equally many.

    Args:
        workers: how many each host has, in the order in which they come in.

    Raises:
        LayoutError: the config takes no number of them.
    """
    refused: AllranksError | None = None
    for world in range(sum(workers), 0, -1):
        seats = _fill(workers, world)
        taken = [(seat, there) for seat, there in zip(seats, workers, strict=True) if seat]
        if config.layout.dp_replicate == "nodes" and {*taken} != {(taken[0][1], taken[0][1])}:
            continue
        try:
            resolve_layout(config, world, len(taken))
        except AllranksError as error:
            refused = refused or error
        else:
            return seats
    why = str(refused).partition(";")[0]
    raise LayoutError(f"the layout does not take {sum(workers)} worker(s), nor fewer: {why}")


def _fill(workers: Sequence[int], world: int) -> tuple[int, ...]:
    seats, left = [], world
    for there in workers:
        seats.append(min(there, left))
        left -= seats[-1]
    return tuple(seats)
