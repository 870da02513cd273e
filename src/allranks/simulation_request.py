"""SimulationRequest: what `allranks simulate` was asked, as one value."""

from dataclasses import dataclass
from pathlib import Path
from typing import final


@final
@dataclass(frozen=True)
class SimulationRequest:
    """The options of `allranks simulate`, as they were written; nothing is checked yet.

    Attributes:
        arguments: as of `allranks plan`; () where the user gives step and cost.
        step, every, save_cost, load, peer_every, detect, restart: times with a unit (15s, 10min, 1h).
        storage: GB/s of all nodes together.
        spares, runs: None: chosen, and said why.
    """

    cluster: str
    arguments: tuple[str, ...] = ()
    days: float = 30.0
    failures: str = "llama3"
    layout: str | None = None
    global_batch: int | None = None
    step: str | None = None
    every: str | None = None
    save_cost: str | None = None
    load: str | None = None
    storage: float | None = None
    peer_every: str | None = None
    detect: str = "15s"
    restart: str = "5min"
    spares: int | None = None
    elastic: bool = False
    runs: int | None = None
    seed: int = 0
    html: Path | None = None
    json: bool = False
