"""Upkeep: what a run does besides computing: it reads samples, and it saves checkpoints."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Upkeep:
    """As a run's config says it, and as it was measured where the run will be.

    Attributes:
        save_every: steps between checkpoints; 0: none comes by their number.
        beside: checkpoints are written from a copy, while the steps go on (`checkpoint.asynchronous`).
        sample_seconds: that one process takes to load one sample and to collate it; None where nobody measured it.
        workers: processes that load, for each training process; 0: the loop's own thread.
        reads_all: each training process reads every rank's samples, too (an iterable dataset of order="global").
        save_seconds: after which one comes that is written beside the steps, where none does by their number; 0: none.
        state_copies: of what a checkpoint holds, that stay in the hosts' memory (`checkpoint.memory_every`).
        state_values: numbers that the optimizer and `train.ema` keep for each trained parameter; 2: Adam's.
    """

    save_every: int = 0
    beside: bool = False
    sample_seconds: float | None = None
    workers: int = 0
    reads_all: bool = False
    save_seconds: float = 0.0
    state_copies: int = 0
    state_values: int = 2
