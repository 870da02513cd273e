"""What the supervisor of a run does for copies of its state in this host's memory.

It opens their directory before workers start, notes there the attempts that know of it, and removes it when the run
has ended, however that was: what is newer there than on the disk is brought to the disk first. No torch.
"""

import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

from allranks.checkpointing.adopting import copy
from allranks.checkpointing.checkpoint import newest_good
from allranks.checkpointing.host_memory import (
    KEEP_IT,
    SHARED_MEMORY,
    HostMemory,
    Record,
    is_distrusted,
    is_own,
    read_record,
    remove_dead,
)
from allranks.errors import CheckpointError, RunError
from allranks.run import Run
from allranks.surviving.left_behind import counts_for, is_newer, left_behind, telling, verify_aloud
from allranks.surviving.supervisor import Supervision


def say_line(line: str) -> None:
    """To this host's user."""
    print(line, file=sys.stderr, flush=True)


@final
class MemoryTier:
    """The copies of one run, from before its workers start to after their end.

    Attributes:
        directory: where they lie.
    """

    def __init__(self, run: Run, memory: HostMemory, say: Callable[[str], None] = say_line) -> None:
        self.directory = memory.directory
        self._run = run
        self._memory = memory
        self._say = say

    def open(self) -> None:
        """Take the directory, before the run's attempt is counted.

        Copies count only if the run's newest attempt knew of them. Otherwise it has gone on elsewhere since, from an
        older state: what lies here is of another past than the journal's, and goes.

        Raises:
            RunError: it cannot be had, or its copies are another directory's that has the same run in it.
        """
        self._memory.open()
        record = read_record(self.directory)
        if record is not None:
            self._refuse_anothers(record)
        if record is None or is_distrusted(self.directory) or not counts_for(self._run, record, self.directory):
            for path in self._memory.clear():
                why = "a guard had ended the run, or it has gone on elsewhere since"
                self._say(f"warning: {path.name} in the memory of this host does not count, and is gone: {why}")

    def begin_attempt(self) -> None:
        """Count an attempt of the run, which knows of what lies here.

        Whenever this ends too early, what is noted and what is counted agree: the copies count for both attempts as
        long as none of the new one is there.
        """
        following = secrets.token_hex(8)
        self._note(self._run.attempt, following)
        self._run.begin_attempt(following)
        self._note(following)

    def followed(self, supervision: Supervision) -> Supervision:
        """The same supervision, whose attempts are noted here too."""
        return replace(supervision, next_attempt=self.begin_attempt)

    def close(self) -> None:
        """The run has ended, and nobody writes here any more: nothing stays that the disk has not."""
        if not self._memory.stands():
            self._say(f"warning: {self.directory} has vanished, with the copies in it; {KEEP_IT}")
        try:
            self._bring_newest()
        except (CheckpointError, OSError) as error:
            self._memory.release()
            self._say(
                f"warning: what {self.directory} has cannot be brought to the disk, so it stays: {error}; "
                f"`--resume {self._run.path}` on this host takes it"
            )
            return
        try:
            self._memory.close()
        except RunError as error:
            self._memory.release()
            self._say(f"warning: {error}; delete it, it takes memory")

    def _refuse_anothers(self, record: Record) -> None:
        """A copy of a RUN directory has its id: what counts for the original is not for the copy to take."""
        own = self._run.path.resolve()
        if record.run == own or (record.run.exists() and own.samefile(record.run)):
            return
        other = left_behind(self.directory, self._say)
        if other is not None:
            self._memory.release()
            raise RunError(f"{own} is a copy of {other.run}, which comes first: {other}")

    def _note(self, *attempts: str) -> None:
        """What cannot be noted ends no run: the copies do not count for a later command then."""
        try:
            if not self._memory.stands():
                self._say(
                    f"warning: {self.directory} has vanished, with the copies in it, and is made again; {KEEP_IT}"
                )
                self._memory.open()
            self._memory.note(Record(self._run.path.resolve(), attempts))
        except (RunError, OSError) as error:
            self._say(f"warning: copies in the memory of this host may not outlive this command: {error}")

    def _bring_newest(self) -> None:
        if is_distrusted(self.directory):
            return
        newest, _ = newest_good(self.directory, self._run.id, partial(verify_aloud, say=self._say))
        if newest is not None and is_newer(newest.path, self._run, self._say):
            brought = copy(newest, self._run.checkpoints)
            self._say(f"{brought.path.name}, which was in the memory of this host alone, is on the disk now")


def open_memory(
    run: Run, *, wanted: bool, root: Path = SHARED_MEMORY, say: Callable[[str], None] = say_line
) -> MemoryTier | None:
    """The copies of a run whose attempt has yet to begin, to be closed at its end. What dead runs have left here goes,
    but for what one of them has nowhere else: of that it is said.

    Args:
        wanted: whether new copies are asked for. Where they are not, those that a killed start has left still count.

    Returns:
        None where there are no copies, and none are wanted.

    Raises:
        RunError: they cannot be kept here.
    """
    memory = HostMemory(run.id, root)
    remove_dead(memory.directory, telling(say, run.id), root)
    if not wanted and not is_own(memory.directory):  # of another user it is nothing that this run has left
        return None
    tier = MemoryTier(run, memory, say)
    tier.open()
    return tier
