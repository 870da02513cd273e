"""Which attempt of a run was the last to go on from a state: whose copies in the memory of several hosts count. No
torch.

    RUN/went_on.json    that attempt's number; there from the first start with such copies on

An attempt that is counted and dies before it has looked at what there is has changed nothing: the copies are still the
newest state. So what is compared is not the number of the attempt before.
"""

import json
from contextlib import suppress
from pathlib import Path

from allranks.checkpointing.commit import check_attempt
from allranks.durable import refusing, replacing, write_json
from allranks.ordinary_file import read_small
from allranks.run import Run


def last_to_go_on(run: Run) -> int | None:
    """The number of that attempt; None: nobody has noted one, or it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_small(_file(run)).decode())
        if isinstance(found, dict) and found.get("run") == run.id and type(found.get("attempt")) is int:
            return int(found["attempt"])
    return None


def has_noted(run: Run) -> bool:
    """Whether any attempt ever has, so that hosts may have copies that count: the same for all who see RUN."""
    return _file(run).exists()


def note_going_on(run: Run, *, first: bool = True) -> None:
    """The attempt that `run` knows of goes on, on the disk: no older copy counts any more.

    Args:
        first: whether to note it also where no attempt has before.

    Raises:
        CheckpointError: a later attempt has begun.
        RunError: the system refuses.
    """
    if not first and not has_noted(run):
        return
    with refusing(run.path), replacing(_file(run)) as temporary:
        write_json(temporary, {"run": run.id, "attempt": run.attempts})
        check_attempt(run.checkpoints / _file(run).name, run.id, run.attempts)  # this process may have been frozen


def _file(run: Run) -> Path:
    return run.path / "went_on.json"
