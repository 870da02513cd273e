"""After the first save: does the checkpoint hold all that a resume needs, as it is now?

The Saver has read the files back by then: they hold what was written. Here the live run is held against the manifest:
every tensor that ranks hold has the digest that was kept, nothing that is learnt was left out, and position, step and
schedule are those of now. What is due is read off the run by itself, not by the way in which it was saved.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from allranks.checkpointing.checking import check_digests
from allranks.checkpointing.checkpoint import Checkpoint
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


def prove(checkpoint: Checkpoint, live: Live, contents: Contents) -> Verdict | None:
    """What is wrong with a checkpoint of `contents`, saved just now; the same on every rank; collective."""
    processes, manifest = live.processes, checkpoint.manifest
    kept = {name.removesuffix(EACH) for name in manifest.tensors} | set(manifest.state.get("optimizer", {}))
    # Two of one class have the same names: only by itself is one told from the other.
    mine = [ANOTHER] if live.optimizers is not contents.optimizers else []
    mine += [f"{name} is not in it" for name in _due(live) if name not in kept] + _state(checkpoint, live)
    told = everyones(mine[:SHOWN], processes.world_group, processes.device)
    found = list(dict.fromkeys(line for lines in told for line in lines))
    if not found:
        try:
            check_digests(checkpoint, contents.parts(), processes.world_group, processes.device)
        except CheckpointError as error:
            found = [f"it does not hold what the ranks hold: {str(error).partition(': ')[2]}"]
    if not found:
        return None
    what = f"a resume from {checkpoint.path.name} would not go on as the run does: {found[0]}"
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
                keys = (key for key, value in state.items() if isinstance(value, torch.Tensor))
                yield from (f"{prefix}.{key}.{entry.name}" for key in keys)
    for other in live.beside:
        yield from (entry.name for entry, _ in other.parts())


def _state(checkpoint: Checkpoint, live: Live) -> list[str]:
    """What of it that is no tensor is not as it is now."""
    manifest, stream = checkpoint.manifest, live.stream
    pairs: dict[str, tuple[Any, Any]] = {
        "step": (manifest.step, stream.step),
        "samples": (manifest.samples, stream.position),
        "position": (manifest.state.get("stream"), stream.state_dict()),
        "schedule": (manifest.state.get("schedule"), live.schedule and live.schedule.state_dict()),
    }
    return [f"its {name} is {kept}, and the run's {now}" for name, (kept, now) in pairs.items() if kept != now]
