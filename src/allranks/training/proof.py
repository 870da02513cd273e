"""After the first save: does the checkpoint hold all that a resume needs, as it is now?

The Saver has read the files back by then: they hold what was written. Here the live run is held against the manifest:
every tensor that ranks hold has the digest that was kept, nothing that is learnt was left out, and position, step and
schedule are those of now. What is due is read off the run by itself, not by the way in which it was saved.

Of a checkpoint that is written beside the steps what is due is read when it is begun, and held against it once it is
committed. By then the live tensors are others: theirs were digested when they were copied, and the files were compared
with that (stage.py, background.py).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch

from allranks.checkpointing.checking import check_digests
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.exchange import broadcast_bytes
from allranks.checkpointing.manifest import parse_manifest, render_manifest
from allranks.data.stream import DataStream
from allranks.errors import CheckpointError
from allranks.parallel.spread import Spread
from allranks.parameter_map import EACH
from allranks.stepping.alike import everyones
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.schedule import Schedule
from allranks.stepping.world import Processes
from allranks.training.beside import Beside
from allranks.training.snapshot import Contents
from allranks.verdict import Verdict

SHOWN = 8
READ = b"read"
ANOTHER = "its optimizer is not the one that makes the steps"
NAMED = "give world.resume the optimizer that world.step is given"
REPORT = "if no memory or disk is at fault, please report it, with the run's config"


class Live(Protocol):
    """What is trained, as it is now: a Session, or an own loop's."""

    @property
    def processes(self) -> Processes:
        """Who trains it."""

    @property
    def spread(self) -> Spread:
        """The model."""

    @property
    def optimizers(self) -> Optimizers:
        """What makes its updates."""

    @property
    def stream(self) -> DataStream:
        """The samples, and how many were seen."""

    @property
    def schedule(self) -> Schedule | None:
        """Of the learning rate; None: the user moves it."""

    @property
    def beside(self) -> Sequence[Beside]:
        """What else has tensors."""


@final
@dataclass(frozen=True, slots=True)
class Due:
    """What a checkpoint of a moment has to hold, but for the values of tensors: as far as this rank knows.

    Attributes:
        another: whether its optimizer is not the one that makes the steps.
        names: of tensors.
        state: what is no tensor.
    """

    another: bool
    names: tuple[str, ...]
    state: Mapping[str, Any]


def what_is_due(live: Live, contents: Contents) -> Due:
    """Of a checkpoint of `contents` as they are now; no collective call."""
    stream = live.stream
    state = {
        "step": stream.step,
        "samples": stream.position,
        "position": stream.state_dict(),
        "schedule": live.schedule and live.schedule.state_dict(),
    }
    # Two of one class have the same names: only by itself is one told from the other.
    return Due(live.optimizers is not contents.optimizers, tuple(_due(live)), state)


def prove_what_was_due(path: Path, due: Due, processes: Processes) -> Verdict | None:
    """What is wrong with a checkpoint that was begun when that was `due`; the same on every rank; collective.

    Rank 0, which committed it, reads it for all: another host may still see the directory that it has replaced.
    """
    told = b""
    if processes.rank == 0:
        try:
            told = READ + render_manifest(Checkpoint.open(path).manifest).encode()
        except (CheckpointError, OSError) as error:  # the other ranks wait for what this one has found
            told = f"it cannot be read: {error}".encode()
    told = broadcast_bytes(told, processes.world_group, processes.device)
    if not told.startswith(READ):
        return _tell(path, [told.decode()])
    checkpoint = Checkpoint(path, parse_manifest(told.removeprefix(READ), str(path)))
    return _tell(path, _all_find(_lacks(checkpoint, due), processes))


def prove(checkpoint: Checkpoint, live: Live, contents: Contents) -> Verdict | None:
    """What is wrong with a checkpoint of `contents`, saved just now; the same on every rank; collective."""
    processes = live.processes
    found = _all_find(_lacks(checkpoint, what_is_due(live, contents)), processes)
    if not found:
        try:
            check_digests(checkpoint, contents.parts(), processes.world_group, processes.device)
        except CheckpointError as error:
            found = [f"it does not hold what the ranks hold: {str(error).partition(': ')[2]}"]
    return _tell(checkpoint.path, found)


def _all_find(mine: list[str], processes: Processes) -> list[str]:
    told = everyones(mine[:SHOWN], processes.world_group, processes.device)
    return list(dict.fromkeys(line for lines in told for line in lines))


def _tell(path: Path, found: list[str]) -> Verdict | None:
    if not found:
        return None
    what = f"a resume from {path.name} would not go on as the run does: {found[0]}"
    remedy = f"do not resume from it; {NAMED if ANOTHER in found else REPORT}"
    return Verdict("checkpoint_unproven", what, tuple(found[1:]), remedy)


def _due(live: Live) -> Iterator[str]:
    """The names of what this rank's part of the run has learnt, or follows."""
    yield from (f"model.{name}" for name in live.spread.map.stored)
    for which, optimizer in live.optimizers.by_name.items():
        prefix = f"optimizer.{which}" if which else "optimizer"
        for parameter, state in optimizer.state.items():
            entry = live.optimizers.entries.get(id(parameter))
            if entry is not None:  # a stranger is refused before the save
                yield from (f"{prefix}.{leaf}.{entry.name}" for key in state for leaf in _leaves(str(key), state[key]))
    for other in live.beside:
        yield from (entry.name for entry, _ in other.parts())


def _leaves(name: str, value: object) -> Iterator[str]:
    """The names of the tensors and numbers that a value of an optimizer's state holds, whatever they lie in."""
    if isinstance(value, Mapping):
        members = [(f"{name}[{key!r}]", member) for key, member in value.items()]
    elif hasattr(value, "_fields"):
        members = [(f"{name}.{key}", getattr(value, key)) for key in value._fields]
    elif isinstance(value, list | tuple | deque):
        members = [(f"{name}[{index}]", member) for index, member in enumerate(value)]
    else:
        yield from [name] * isinstance(value, torch.Tensor | int | float)
        return
    for path, member in members:
        yield from _leaves(path, member)


def _lacks(checkpoint: Checkpoint, due: Due) -> list[str]:
    """What of that it has not, or otherwise."""
    manifest = checkpoint.manifest
    kept = {name.removesuffix(EACH) for name in manifest.tensors} | set(manifest.state.get("optimizer", {}))
    state: dict[str, Any] = {
        "step": manifest.step,
        "samples": manifest.samples,
        "position": manifest.state.get("stream"),
        "schedule": manifest.state.get("schedule"),
    }
    return [
        *([ANOTHER] if due.another else []),
        *(f"{name} is not in it" for name in due.names if name not in kept),
        *(f"its {name} is {state[name]}, and the run's {now}" for name, now in due.state.items() if state[name] != now),
    ]
