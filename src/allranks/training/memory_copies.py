"""Copies of the state in the memory of this host, as a training makes them between its checkpoints on the disk.

They are checkpoints like those, in another directory: written by the same code, read by the same code. One stays, and
the next takes its place when it is whole.
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import final

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints
from allranks.checkpointing.host_memory import KEEP_IT, distrust, is_open
from allranks.checkpointing.peers import Hosts, first_word
from allranks.errors import ConfigError
from allranks.free_memory import free_bytes
from allranks.stepping.alike import everyones
from allranks.stepping.world import Processes
from allranks.training.saver import Saver
from allranks.training.stage_room import USABLE
from allranks.units import format_bytes


@final
class MemoryCopies:
    """Those of one training: whole in the memory of one host, or on several each file in that of two (peers.py).

    Args:
        saver: that writes to the disk.
        hosts: which ranks share a memory; None: all.
        directory: that the run's supervisor has leased for them.
        resumed: what the run goes on from. If it is a copy it stays until there is another; all other copies go now,
            because they are older, damaged or half-written.
        refuses: whether too little room ends the run. Not where workers were started again: what was free then may
            have been what another has taken since, and the run goes on without copies.

    Attributes:
        saver: that writes the copies.
    """

    def __init__(
        self,
        saver: Saver,
        processes: Processes,
        directory: Path,
        resumed: Checkpoint | None,
        hosts: Hosts | None = None,
        *,
        refuses: bool,
    ) -> None:
        self.saver = saver.in_memory(directory, hosts)
        self._processes = processes
        self._directory = directory
        self._kept_bytes = resumed.num_bytes if resumed is not None and lies_in(directory, resumed) else 0
        # A host that joins may not refuse what the others have gone on with.
        self._refuses = refuses if hosts is None else all(everyones(refuses, processes.world_group, processes.device))
        self._hosts = hosts
        self._copy_bytes: int | None = None
        self._looks = processes.rank == 0 if hosts is None else hosts.first
        if self._looks:
            clear_copies(directory, None if resumed is None else resumed.path)

    def due(self, step: int) -> bool:
        """Whether one is to be made after `step` steps; collective.

        The first call sees that there is room. It comes after a step, when optimizers have all of their state.

        Raises:
            ConfigError: on every rank: there is none.
        """
        if self._copy_bytes is None:
            of_ranks = self.saver.bytes_of_ranks()
            self._copy_bytes = sum(of_ranks) if self._hosts is None else self._hosts.bytes_beside(of_ranks)
            if self._refuses:
                self._check_room(self._copy_bytes)
        return self.saver.due(step)

    def obstacle(self) -> str:
        """Why the copy that is due cannot be made, in words; "": it can. Collective, after `due`."""
        return self._say(self._look() if self._looks else "")

    def _say(self, word: str) -> str:
        """What the first of the ranks that look has to say, on every rank; collective."""
        return first_word(word, self._processes.world_group, self._processes.device)

    def _look(self) -> str:
        assert self._copy_bytes is not None
        if not is_open(self._directory):
            return f"{self._directory} has vanished; it is made again when workers start again; {KEEP_IT}"
        copies = 1 if self.saver.saved_step >= 0 else self._num_copies - 1  # the one that stays is there, or never was
        free = free_bytes(self._directory)
        if copies * self._copy_bytes > USABLE * free:
            return f"it takes {format_bytes(copies * self._copy_bytes)}, and {format_bytes(free)} are free"
        return ""

    @property
    def _num_copies(self) -> int:
        return 3 if self.saver.beside else 2  # the one that stays, the next one, and what a thread writes that from

    def _check_room(self, copy_bytes: int) -> None:
        refusal = self._say(self._refuse(copy_bytes) if self._looks and is_open(self._directory) else "")
        if refusal:
            raise ConfigError(refusal)

    def _refuse(self, copy_bytes: int) -> str:
        """Why copies of so many bytes do not fit on this host; "": they do."""
        free = free_bytes(self._directory) + self._kept_bytes
        if self._num_copies * copy_bytes <= USABLE * free:
            return ""
        return (
            f"checkpoint.memory_every: {self._num_copies} copies of {format_bytes(copy_bytes)} are there at a time, "
            f"and {format_bytes(free)} are free in {self._directory.parent} and in the memory of this host; make room "
            "(docker: --shm-size or --ipc=host), or leave the key out"
        )


def forsake(memory: Path | None, rank: int, hosts: Hosts | None, checkpoints: Path) -> None:
    """A guard has ended the run: what it has found wrong may be in every copy, and the disk's are older.

    For every rank: the first that ends takes the others with it, which may be writing still.

    Args:
        checkpoints: RUN's, where hosts learn that have no rank which could tell them any more.
    """
    if memory is None:
        return
    for directory in (memory,) if hosts is None else (memory, checkpoints):
        with suppress(OSError):
            distrust(directory)
    if rank == 0 if hosts is None else hosts.first:
        clear_copies(memory, None)


def clear_copies(directory: Path, spared: Path | None) -> None:
    """Remove the copies that lie in it, half-written ones too, but for `spared`."""
    with suppress(FileNotFoundError):  # somebody else removes it
        for path in directory.iterdir():
            if path.is_dir() and path != spared:
                shutil.rmtree(path)


def lies_in(memory: Path | None, checkpoint: Checkpoint | None) -> bool:
    """Whether it is a copy in `memory`."""
    return memory is not None and checkpoint is not None and checkpoint.path.parent == memory


def tell_tier(memory: Path | None, checkpoint: Checkpoint, directory: Path) -> str:
    """Where the checkpoint lies that a run goes on from, and what the other place has; "" where there is only one.

    Args:
        memory: where copies lie in the memory of this host; None: nowhere.
        directory: RUN/checkpoints.
    """
    if memory is None:
        return ""
    if not lies_in(memory, checkpoint):
        return " on the disk: the memory of this host has no newer good copy"
    saved = list_checkpoints(directory)
    return " in the memory of this host: " + (f"the disk has {saved[0].name}" if saved else "the disk has none yet")
