"""What the supervisor of one host does for its part of the copies that several hosts keep in their memory. No torch.

Its workers bring together what is left of a copy when they start (training/peer_copies.py). Here its directory is
opened before, and removed when the run has ended; what the hosts have beyond the disk then each of them brings there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import final

from allranks.checkpointing.going_on import has_noted, last_to_go_on
from allranks.checkpointing.host_memory import (
    KEEP_IT,
    SHARED_MEMORY,
    HostMemory,
    is_distrusted,
    parts_of,
    read_record,
    remove_dead,
)
from allranks.checkpointing.joining import bring_part, is_wanted, list_parts, take_away
from allranks.errors import CheckpointError, RunError
from allranks.run import Run
from allranks.surviving.left_behind import telling
from allranks.surviving.memory_tier import say_line
from allranks.surviving.supervisor import Supervision


@final
class PeerMemory:
    """This host's part, from before its workers start to after their end.

    Attributes:
        directory: where it lies.
    """

    def __init__(self, run: Run, memory: HostMemory, say: Callable[[str], None] = say_line) -> None:
        self.directory = memory.directory
        self._run, self._memory, self._say = run, memory, say

    def followed(self, supervision: Supervision) -> Supervision:
        """The same: the workers of every attempt note themselves that they know of what lies here."""
        return supervision

    def close(self) -> None:
        """The run has ended for this host, and nobody writes here any more."""
        if not self._memory.stands():
            self._say(f"warning: {self.directory} has vanished, with what this host had of the copies; {KEEP_IT}")
        try:
            self._bring()
            self._memory.close()
        except (CheckpointError, RunError, OSError) as error:
            self._memory.release()
            self._say(
                f"warning: what {self.directory} has of a copy stays there: {error}; `--resume {self._run.path}` with "
                "the same hosts takes it; or delete it, it takes memory"
            )

    def _bring(self) -> None:
        record, parts = read_record(self.directory), list_parts(self.directory, self._run.id)
        if record is None or not parts or is_distrusted(self.directory):
            return
        newest = Run.open(self._run.path)
        last = last_to_go_on(newest)
        if str(newest.attempts if last is None else last) not in record.attempts:
            return  # the others have gone on without this host: they have what it had
        for part in parts:
            if is_distrusted(newest.checkpoints):
                return
            if not is_wanted(part.newness, newest.checkpoints, newest.id):
                take_away(part, newest.checkpoints, newest.attempts)
                continue
            for line in bring_part(part, newest.checkpoints, newest.attempts):
                self._say(f"warning: {line}")
            if (newest.checkpoints / part.path.name).is_dir():
                self._say(f"{part.path.name}, which was in the memory of hosts alone, is on the disk now")


def open_peer_memory(
    run: Run, *, wanted: bool, root: Path = SHARED_MEMORY, say: Callable[[str], None] = say_line
) -> PeerMemory | None:
    """This host's part of the copies of a run on several hosts, to be closed at its end; as `open_memory`.

    Args:
        wanted: whether new copies are asked for. Where they are not, what killed commands have left still counts, if
            an attempt has noted that it went on.

    Returns:
        None where new ones are not wanted, and this host has left nothing that may count; another one may have.

    Raises:
        RunError: it cannot be kept here.
    """
    if not wanted and not (has_noted(run) and parts_of(run.id, root)):
        return None
    memory = HostMemory.open_part(run.id, root)
    remove_dead(memory.directory, telling(say, run.id), root)
    return PeerMemory(run, memory, say)
