"""What the pool and its workers say to each other; imports no torch, so that the pool does not either."""

import os
import signal
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setup:
    """What a worker is told before its first case; `environment` is added to its own."""

    rank: int
    world_size: int
    group: bool
    store_port: int
    stack_file: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A case that returned; `value` is pickled."""

    value: bytes


@dataclass(frozen=True)
class Failed:
    """A case that raised, `moment` seconds on the machine's monotonic clock; `error` is pickled, if it can be."""

    moment: float
    error: bytes | None
    text: str


def kill(pid: int) -> None:
    """End a process at once, if it has not ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
