"""After the first save: does the checkpoint hold all that a resume needs, as it is now?

The Saver has read the files back by then: they hold what was written. Here the live run is held against the manifest:
every tensor that ranks hold has the digest that was kept, nothing that is learnt was left out, and position, step and
schedule are those of now. What is due is read off the session by itself, not by the way in which it was saved.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from allranks.checkpointing.checking import check_digests
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.parts import Parts
from allranks.errors import CheckpointError
from allranks.parameter_map import EACH
from allranks.stepping.alike import everyones
from allranks.stepping.session import Session
from allranks.verdict import Verdict

SHOWN = 8


def prove(checkpoint: Checkpoint, session: Session, parts: Callable[[], Parts]) -> Verdict | None:
    """What is wrong with a checkpoint that was saved just now, the same on every rank; collective.

    Args:
        parts: everything that the ranks hold now, by the names in the checkpoint; collective.
    """
    processes, manifest = session.processes, checkpoint.manifest
    kept = {name.removesuffix(EACH) for name in manifest.tensors} | set(manifest.state.get("optimizer", {}))
    mine = [f"{name} is not in it" for name in _due(session) if name not in kept] + _state(checkpoint, session)
    told = everyones(mine[:SHOWN], processes.world_group, processes.device)
    found = list(dict.fromkeys(line for lines in told for line in lines))
    if not found:
        try:
            check_digests(checkpoint, parts(), processes.world_group, processes.device)
        except CheckpointError as error:
            found = [f"it does not hold what the ranks hold: {str(error).partition(': ')[2]}"]
    if not found:
        return None
    what = f"a resume from {checkpoint.path.name} would not go on as the run does: {found[0]}"
    remedy = "do not resume from it; if no memory or disk is at fault, please report it, with the run's config"
    return Verdict("checkpoint_unproven", what, tuple(found[1:]), remedy)


def _due(session: Session) -> Iterator[str]:
    """The names of what this rank's part of the run has learnt, or follows."""
    yield from (f"model.{name}" for name in session.spread.map.stored)
    for which, optimizer in session.optimizers.by_name.items():
        prefix = f"optimizer.{which}" if which else "optimizer"
        for parameter, state in optimizer.state.items():
            name = session.optimizers.entries[id(parameter)].name
            yield from (f"{prefix}.{key}.{name}" for key, value in state.items() if isinstance(value, torch.Tensor))
    for other in session.beside:
        yield from (entry.name for entry, _ in other.parts())


def _state(checkpoint: Checkpoint, session: Session) -> list[str]:
    """What of it that is no tensor is not as it is now."""
    manifest, stream = checkpoint.manifest, session.stream
    pairs: dict[str, tuple[Any, Any]] = {
        "step": (manifest.step, stream.step),
        "samples": (manifest.samples, stream.position),
        "position": (manifest.state.get("stream"), stream.state_dict()),
        "schedule": (manifest.state.get("schedule"), session.schedule.state_dict()),
    }
    return [f"its {name} is {kept}, and the run's {now}" for name, (kept, now) in pairs.items() if kept != now]
