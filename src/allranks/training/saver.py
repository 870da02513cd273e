"""Who writes the checkpoints of a run: while the training waits, or beside it."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import final

from allranks.checkpointing.background import BackgroundSave, World
from allranks.checkpointing.checking import check_files
from allranks.checkpointing.checkpoint import Checkpoint, Header, check_sizes, discard, step_name, verify_files
from allranks.checkpointing.commit import explain
from allranks.checkpointing.peers import Hosts, save_on_hosts
from allranks.checkpointing.portion import place_of, portion_of
from allranks.checkpointing.retention import bytes_in, prune
from allranks.checkpointing.save import save
from allranks.checkpointing.stage import Stage
from allranks.config import CheckpointConfig
from allranks.errors import CheckpointError
from allranks.recorded import note_device_error
from allranks.stepping.alike import everyones
from allranks.stepping.world import Processes
from allranks.training.mirroring import Mirroring
from allranks.training.save_clock import SaveClock
from allranks.training.snapshot import Contents, check_state
from allranks.training.stage_room import find_shortage
from allranks.units import format_bytes
from allranks.verdict import Decision

READ_BYTES = 1 << 30  # takes a second or two, for which a training may wait at each save
READ_BESIDE_BYTES = 1 << 33


def print_warning(line: str) -> None:
    """Say it on standard error."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


@final
class Saver:
    """Writes the checkpoints of one run.

    Args:
        directory: RUN/checkpoints.
        run: the run's id.
        generation: the attempt, counted over restarts.
        warn: told, on rank 0, that old checkpoints cannot be deleted, once until they can, or that a host lacks the
            memory to write beside the training; by default it prints that.
        mirroring: brings what rank 0 has committed to another place; None: nobody does.

    Attributes:
        beside: whether those that come at an interval are written beside the training.
        failures: saves in a row that may fail while the training goes on.
        clock: says when one is due by the time that has passed.
        saved_step: of the newest checkpoint that is committed, or that the run has begun from; -1: none.
        prove: called after the first save where the training waits for it, with the checkpoint and what it is of;
            collective.
        expect: called where that is written beside the training, when it is begun, with what it is of; what it returns
            is called with the path, on every rank, once it is committed; collective.

    Raises:
        TaskError: something that is no tensor cannot be kept; said now, not at the first save.
    """

    def __init__(
        self,
        contents: Contents,
        processes: Processes,
        config: CheckpointConfig,
        directory: Path,
        run: str,
        generation: int,
        warn: Callable[[str], None] = print_warning,
        mirroring: Mirroring | None = None,
    ) -> None:
        check_state(contents)
        # By auto none that comes by time is: nobody asked for it, and its copy might not fit into the host's memory.
        waits = config.asynchronous == "auto" and config.every_seconds is not None
        self.beside = config.beside(processes.device.type) and not waits
        self.failures = config.failures
        self.clock = SaveClock(config.every_seconds, counts=processes.rank == 0)
        self.saved_step = -1
        self._contents, self._processes, self._config = contents, processes, config
        self._directory, self._run, self._generation = directory, run, generation
        self._token = f"{run[:8]}_{generation}"
        self._warn, self._mirroring = warn, mirroring
        self._warned = self._proven = self._held_against = False
        self.prove: Callable[[Checkpoint, Contents], None] = lambda checkpoint, contents: None
        self.expect: Callable[[Contents], Callable[[Path], None]] = lambda contents: lambda path: None
        self._hold_against: Callable[[Path], None] = lambda path: None
        self._good, self._read = set[Path](), set[Path]()
        self._most_bytes = READ_BESIDE_BYTES if self.beside else READ_BYTES
        self._stage, self._newest_bytes = Stage(), 0
        self._hosts: Hosts | None = None

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """The run has begun from this one of its directory, of which all ranks together have read every byte."""
        self.saved_step = checkpoint.step
        self._good.add(checkpoint.path)
        self._read.add(checkpoint.path)

    def in_memory(self, directory: Path, hosts: Hosts | None = None) -> "Saver":
        """The Saver of the same run into the memory of this host: every `checkpoint.memory_every` steps, and one stays.

        With `hosts` it writes into that of each, and never beside the training.

        Only one of the two may be writing beside the training at a time: they copy what is live into the same memory.
        """
        rhythm = {"every": self._config.memory_every, "keep": 1, "keep_every": None, "quota_gb": None}
        config = self._config.model_copy(update=rhythm)
        saver = Saver(self._contents, self._processes, config, directory, self._run, self._generation, self._warn)
        saver._stage, saver._most_bytes = self._stage, 0
        saver._hosts, saver.beside = hosts, saver.beside and hosts is None
        return saver

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` steps."""
        return self.clock.due or (self._config.every is not None and step % self._config.every == 0)

    def goes_beside(self) -> bool:
        """Whether the next checkpoint is written beside the training; collective the first time.

        Not where a host lacks the memory for the copy, which is looked at before there is one, and told.
        """
        if self.beside and self._stage.fits is None:
            shortage = find_shortage(self.bytes_of_ranks(), self._processes)
            self._stage.fits = not shortage
            if shortage and self._processes.rank == 0:
                self._warn(f"checkpoints are written while the training waits for them: {shortage}")
        self.beside = self.beside and self._stage.fits is not False
        return self.beside

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was chosen, where the config leaves it to us and saves at an interval."""
        if not self.beside or self._config.asynchronous != "auto" or self._config.every is None:
            return self.clock.decisions
        because = "a copy in the host's memory takes nothing from a model on CUDA; checkpoint.asynchronous=false waits"
        return (*self.clock.decisions, Decision("checkpoints are written beside the steps", because))

    def save(self, step: int, before_commit: Callable[[], None] = lambda: None) -> Path:
        """Write one after `step` steps, prove the first, keep the newest few; arguments as of `save`, collective."""
        contents, processes = self._contents, self._processes
        self._make_room(step)
        write = save if self._hosts is None else partial(save_on_hosts, hosts=self._hosts)
        checkpoint = write(
            self._directory,
            header=self._header(step),
            parts=contents.parts(),
            aliases=contents.aliases(),
            state=contents.state(),
            group=processes.world_group,
            rank=processes.rank,
            world_size=processes.size,
            token=self._token,
            device=processes.device,
            tells=processes.mesh.first_of_stage,
            before_commit=before_commit,
        )
        if self._hosts is None:
            self._prove(checkpoint)
        self.saved_step = step
        return checkpoint.path

    def _prove(self, checkpoint: Checkpoint) -> None:
        """See that the first one can be read, as a resume would, and let old ones go; collective."""
        contents, processes = self._contents, self._processes
        if not self._proven:
            check_files(checkpoint, processes.world_group, processes.device)
            self._proven = True
        if not self._held_against:
            self._held_against = True
            self.prove(checkpoint, contents)
        if processes.rank == 0:
            self._keep(checkpoint)

    def begin(self, step: int, before_commit: Callable[[], None]) -> BackgroundSave:
        """Copy what a checkpoint after `step` steps holds, and begin to write it; collective where contents are.

        The one before has to be settled. What fails on this rank is told by the BackgroundSave, whose `before_commit`
        this is.
        """
        contents, processes = self._contents, self._processes
        self._make_room(step)
        place = place_of(self._directory, self._header(step), self._token)
        world = World(processes.world_group, processes.rank, processes.size, processes.device)
        parts, aliases, state = contents.parts(), contents.aliases(), contents.state()
        proves = not self._proven
        if not self._held_against:
            self._hold_against = self.expect(contents)
        try:
            portion = portion_of(parts, processes.rank, aliases, state, tells=processes.mesh.first_of_stage)
            copied, ready = self._stage.copy(portion, proves=proves)
        except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
            note_device_error(error)
            return BackgroundSave(place, CheckpointError(explain(error, place.temporary)), world)
        return BackgroundSave(
            place, copied, world, ready=ready, proves=proves, before_commit=before_commit, after_commit=self._keep
        )

    def settled(self, step: int) -> None:
        """What was begun for `step` is committed, and all ranks know it; collective."""
        self.saved_step, self._proven = step, True
        if not self._held_against:
            self._held_against = True
            self._hold_against(self._directory / step_name(step))

    def bytes_of_ranks(self) -> list[int]:
        """Of the tensors of one checkpoint, what each rank writes; collective."""
        contents, processes = self._contents, self._processes
        portion = portion_of(contents.parts(), processes.rank, {}, {}, tells=False)
        return everyones(portion.num_bytes, processes.world_group, processes.device)

    def forget(self, step: int) -> None:
        """Let go what may have been written of that step: it is not to be trusted."""
        if self._processes.rank == 0 if self._hosts is None else self._hosts.first:
            with suppress(CheckpointError):
                discard(self._directory / step_name(step))

    def tidy(self) -> None:
        """Let old ones go, and what dead writers left. What stays costs room, not the run: the next one tries again."""
        if self._processes.rank == 0:
            self._free(0)

    def finish(self, progress: Callable[[], None]) -> None:
        """Wait until all that was committed is in the mirror too; `progress` is called as it comes further."""
        if self._mirroring is not None:
            self._mirroring.finish(progress)
            self.tidy()  # what was kept only to be brought

    def _header(self, step: int) -> Header:
        layout, samples = str(self._processes.mesh.layout), self._contents.stream.position
        return Header(run=self._run, generation=self._generation, layout=layout, step=step, samples=samples)

    def _make_room(self, step: int) -> None:
        """Let older ones go before their time where the checkpoint of `step` would not fit into the quota beside them;
        collective. Where that is not enough it is written all the same, and told: none at all would be worse.
        """
        quota, processes = self._config.quota_bytes, self._processes
        if quota is None:
            return
        coming = max(sum(self.bytes_of_ranks()), self._newest_bytes)
        if processes.rank == 0:
            taken = self._free(coming) + coming
            if taken > quota:
                self._warn(
                    f"with the checkpoint of step {step} {self._directory} takes {format_bytes(taken)}, and "
                    f"checkpoint.quota_gb={self._config.quota_gb:g}: the last good one stays, and what is kept for "
                    "ever (checkpoint.keep_every), read, or on its way to a mirror; delete some by hand, or give it "
                    "more"
                )
        processes.share(None)  # nobody writes before there is room

    def _free(self, coming: int) -> int:
        """Let go what is not kept, and of the newest as many as it takes for `coming` bytes more; what is left, in
        bytes where there is a quota.
        """
        quota, keep = self._config.quota_bytes, self._config.keep
        self._prune(keep)
        if quota is None:
            return 0
        while (taken := bytes_in(self._directory)) + coming > quota and keep > 1:
            keep -= 1
            self._prune(keep)
        return taken

    def _prune(self, keep: int) -> None:
        checked = partial(prune, check=self._check, check_oldest=self._check_oldest, keep_every=self._config.keep_every)
        try:
            leased = self._mirroring.leased() if self._mirroring is not None else ()
            checked(self._directory, keep, self._run, generation=self._generation, leased=leased)
            self._warned = False
        except (CheckpointError, OSError) as error:
            if not self._warned:
                self._warn(f"{error}; the run goes on, and tries again at every save")
            self._warned = True

    def _keep(self, checkpoint: Checkpoint) -> None:
        self._good.add(checkpoint.path)
        self._read.discard(checkpoint.path)  # it may have been replaced
        self._newest_bytes = bytes_in(checkpoint.path) if self._config.quota_gb is not None else 0
        if self._mirroring is not None:
            self._mirroring.bring(checkpoint)
        self.tidy()

    def _check(self, checkpoint: Checkpoint) -> None:
        """What this run's own processes have written, or read once, is not read again: that would cost every save."""
        if checkpoint.path in self._good:
            check_sizes(checkpoint)
        else:
            verify_files(checkpoint)
            self._good.add(checkpoint.path)
            self._read.add(checkpoint.path)

    def _check_oldest(self, checkpoint: Checkpoint) -> None:
        """Before an older one goes, the oldest that stays is read, once, unless that takes too long."""
        if checkpoint.path not in self._read and checkpoint.num_bytes <= self._most_bytes:
            self._good.discard(checkpoint.path)
        self._check(checkpoint)
