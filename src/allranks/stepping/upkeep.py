"""What a Task's run does besides its steps, as its config says it and its first samples showed it."""

from dataclasses import replace
from typing import Protocol

from allranks.config import Config
from allranks.upkeep import Upkeep


class Loaded(Protocol):
    """What is known of a dataset whose first samples were loaded."""

    @property
    def order(self) -> str:
        """As `declared_order` says it."""

    @property
    def sample_seconds(self) -> float:
        """That loading and collating one sample took, at the fastest."""


def upkeep_of(config: Config, kind: str, loaded: Loaded | None) -> Upkeep:
    """On devices of `kind` ("cpu", "cuda").

    Args:
        loaded: on this machine; None where the run will be on another one, whose loading nobody has measured.
    """
    saves, workers = config.checkpoint, config.data.workers
    every, beside = saves.every or 0, saves.beside(kind)
    copies = 0 if saves.memory_every is None else 3 if beside else 2  # training/memory_copies.py
    seconds = saves.every_seconds if saves.asynchronous is True else None  # by auto these are waited for
    found = Upkeep(every, beside, None, workers, save_seconds=seconds or 0.0, state_copies=copies)
    if loaded is None:
        return found
    # One process at most iterates over a dataset (data/loader.py).
    workers = workers if loaded.order == "map" else min(workers, 1)
    return replace(found, sample_seconds=loaded.sample_seconds, workers=workers, reads_all=loaded.order == "global")
