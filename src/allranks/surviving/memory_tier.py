"""What the supervisor of a run does for copies of its state in this host's memory.

It opens their directory before workers start, counts there the attempts that know of it, and removes it when the run
has ended, however that was: what is newer there than on the disk is brought to the disk first. No torch.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import final

from allranks.checkpointing.adopting import copy
from allranks.checkpointing.checkpoint import list_checkpoints, newest_good
from allranks.checkpointing.host_memory import SHARED_MEMORY, HostMemory, is_distrusted, remove_dead
from allranks.errors import CheckpointError
from allranks.run import Run
from allranks.surviving.supervisor import Supervision


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@final
class MemoryTier:
    """The copies of one run, from before its workers start to after their end.

    Attributes:
        directory: where they lie.
    """

    def __init__(self, run: Run, memory: HostMemory, say: Callable[[str], None] = _say) -> None:
        self.directory = memory.directory
        self._run = run
        self._memory = memory
        self._say = say

    def open(self) -> None:
        """Take the directory for the run's attempt, which has begun. Raises RunError: it cannot be had."""
        for path in self._memory.open(self._run.attempts):
            why = "the run has gone on elsewhere since"
            self._say(f"warning: {path.name} in the memory of this host does not count, and is gone: {why}")

    def followed(self, supervision: Supervision) -> Supervision:
        """The same supervision, whose attempts are counted here too."""

        def next_attempt() -> None:
            supervision.next_attempt()
            self._memory.note(self._run.attempts)

        return replace(supervision, next_attempt=next_attempt)

    def close(self) -> None:
        """The run has ended, and nobody writes here any more: nothing stays that the disk has not."""
        try:
            self._bring_newest()
        except (CheckpointError, OSError) as error:
            self._memory.release()
            self._say(
                f"warning: what {self.directory} has cannot be brought to the disk, so it stays: {error}; "
                f"`--resume {self._run.path}` on this host takes it, unless another run starts here before"
            )
        else:
            self._memory.close()

    def _bring_newest(self) -> None:
        copies, saved = list_checkpoints(self.directory), list_checkpoints(self._run.checkpoints)
        if is_distrusted(self.directory):
            return
        if not copies or (saved and _order(saved[0]) >= _order(copies[0])):
            return
        newest, _ = newest_good(self.directory, self._run.id)
        if newest is not None:
            brought = copy(newest, self._run.checkpoints)
            self._say(f"{brought.path.name}, which was in the memory of this host alone, is on the disk now")


def open_memory(run: Run, *, wanted: bool, root: Path = SHARED_MEMORY) -> MemoryTier | None:
    """The copies of a run whose attempt has begun, to be closed at its end; what dead runs have left here goes.

    Args:
        wanted: whether new copies are asked for. Where they are not, those that a killed start has left still count.

    Returns:
        None where there are no copies, and none are wanted.

    Raises:
        RunError: they cannot be kept here.
    """
    memory = HostMemory(run.id, root)
    remove_dead(memory.directory, root)
    if not wanted and not memory.directory.is_dir():
        return None
    tier = MemoryTier(run, memory)
    tier.open()
    return tier


def _order(path: Path) -> tuple[int, str]:
    return len(path.name), path.name  # by number
