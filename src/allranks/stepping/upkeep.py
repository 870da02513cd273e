"""What a Task's run does besides its steps, as its config says it and its first samples showed it."""

from dataclasses import replace
from typing import Protocol

from allranks.config import Config
from allranks.config_sections import OptimizerConfig
from allranks.upkeep import Upkeep

ADAMS = 2
"""Numbers that Adam keeps for each parameter."""


class Loaded(Protocol):
    """What is known of a dataset whose first samples were loaded."""

    @property
    def order(self) -> str:
        """As `declared_order` says it."""

    @property
    def sample_seconds(self) -> float:
        """That loading and collating one sample took, at the fastest."""


def upkeep_of(config: Config, kind: str, loaded: Loaded | None, *, own_optimizer: bool = False) -> Upkeep:
    """On devices of `kind` ("cpu", "cuda").

    Args:
        loaded: on this machine; None where the run will be on another one, whose loading nobody has measured.
        own_optimizer: whether the Task makes it: nobody has asked it what it keeps, and it counts as Adam.
    """
    saves, workers = config.checkpoint, config.data.workers
    every, beside = saves.every or 0, saves.beside(kind)
    copies = 0 if saves.memory_every is None else 3 if beside else 2  # training/memory_copies.py
    seconds = saves.every_seconds if saves.asynchronous is True else None  # by auto these are waited for
    values = (ADAMS if own_optimizer else _values_of(config.optimizer)) + (config.train.ema is not None)
    found = Upkeep(every, beside, None, workers, False, seconds or 0.0, copies, values)
    if loaded is None:
        return found
    # One process at most iterates over a dataset (data/loader.py).
    workers = workers if loaded.order == "map" else min(workers, 1)
    return replace(found, sample_seconds=loaded.sample_seconds, workers=workers, reads_all=loaded.order == "global")


def _values_of(optimizer: OptimizerConfig) -> int:
    """Numbers that torch's optimizer of that name keeps for each parameter from step to step."""
    return int(optimizer.momentum > 0) if optimizer.name == "sgd" else ADAMS
