"""The process that trains: one per rank, started by the command's agent, by torchrun, srun or mpirun."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from allranks import fault_points
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.mirror import Mirror
from allranks.data.worker_process import worker_death
from allranks.errors import ConfigError, GuardError, ProcessError
from allranks.launching.environment import read_environment
from allranks.observing import heartbeat
from allranks.observing.counters import Stopwatch
from allranks.observing.journal import Journal
from allranks.observing.memory import peak_memory_bytes
from allranks.observing.progress import ProgressLine
from allranks.observing.recorder import Recorder
from allranks.parallel.backend import choose_device, start, stop
from allranks.process_environment import ATTEMPT
from allranks.recorded import note_error
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.stepping.session import Session, assemble
from allranks.stepping.world import Processes, gather_processes
from allranks.training.load import task_of_run
from allranks.training.logs import log_of_rank
from allranks.training.memory_copies import MemoryCopies, forsake, lies_in, tell_tier
from allranks.training.mirroring import Mirroring
from allranks.training.newest import resume_warnings
from allranks.training.peer_copies import hosts_of
from allranks.training.prepare import Prepared, prepare, resolve_layout
from allranks.training.rollbacks import add_range, told_at_start
from allranks.training.same_data import compare_data, tell_data
from allranks.training.saver import Saver, print_warning
from allranks.training.screen import Screen
from allranks.training.shortage import explain_shortage, is_shortage
from allranks.training.snapshot import Contents, kept_schedule
from allranks.training.starting_point import OPEN_MIRROR, find_starting_point
from allranks.training.stop import StopRequests
from allranks.training.trainer import EXIT_CODES, Ending, Trainer
from allranks.training.without_agent import settle_together, share_run
from allranks.verdict import Decision

FREE_CHECKPOINTS = "delete what is left in checkpoints/ by hand, or give this user the right to"
NEEDS_SUPERVISOR = (
    "copies in a host's memory are kept by the command that starts all workers on it: take `allranks train --nproc N`, "
    "without another launcher, or leave the key out (where the run has it: checkpoint.memory_every=none)"
)


@dataclass(frozen=True)
class Assignment:
    """What a worker is told.

    Attributes:
        request: what was asked.
        run: the Run directory that the command has made and leased; None where an outside launcher started the ranks.
        decisions: what the command chose, for the banner.
        announce: told where the Run is, once it is there.
        aside: calls a function in a process of its own, where rank 0 plans the layout of a run that names none; None:
            where the command has done so, or nobody is to.
        memory: the directory in this host's memory that the command has leased for copies of the state; None: none.
        peers: whether hosts may have such directories each with a part of every copy, also where this one has none;
            the same on all.
        first_attempt: the command's first one, by the run's count: later ones go on where it would have refused; None:
            this one.
        began: when the command was started, by the clock of `time.monotonic`; None: it is this process.
    """

    request: TrainRequest
    run: Path | None = None
    decisions: tuple[Decision, ...] = ()
    announce: Callable[[Path], None] | None = None
    aside: Callable[..., Any] | None = None
    memory: Path | None = None
    peers: bool = False
    first_attempt: int | None = None
    began: float | None = None


def work(assignment: Assignment) -> int:
    """Train as one rank of the world that the environment describes; the exit code of docs/reference/errors.md."""
    stops = StopRequests.install()
    fault_points.reach("start")
    environment = read_environment(os.environ)
    prepared = _prepared(assignment)
    if prepared.config.checkpoint.memory_every is not None and assignment.memory is None:
        raise ConfigError(f"checkpoint.memory_every: {NEEDS_SUPERVISOR}")
    size, nodes = environment.world_size, environment.num_nodes
    plans = assignment.aside is not None and prepared.is_open and size > 1
    layout = None if plans else resolve_layout(prepared.config, size, nodes)
    choice = choose_device(environment, assignment.request.device, prepared.config.train.backend, layout)
    choice = start(environment, choice, timeout_seconds=prepared.config.guard.longest_wait)
    try:
        if assignment.run is None and size > 1:
            prepared = settle_together(prepared, assignment.request, environment, choice, assignment.aside)
        layout = resolve_layout(prepared.config, size, nodes)
        processes = gather_processes(environment, choice, layout)
        run = prepared.kept if assignment.run is not None else share_run(prepared, assignment.request, processes)
        assert run is not None
        if assignment.announce is not None:
            assignment.announce(run.path)
        try:
            with log_of_rank(run.log(processes.rank), rank=processes.rank) as log_bytes:
                return _Training(assignment, prepared, processes, run, stops).go(log_bytes)
        finally:
            run.release()
    finally:
        stop()


class _Training:
    """One rank's way through a run: assemble, resume, train, close."""

    def __init__(
        self, assignment: Assignment, prepared: Prepared, processes: Processes, run: Run, stops: StopRequests
    ) -> None:
        self._assignment, self._prepared = assignment, prepared
        self._processes, self._run = processes, run
        self._stops, self._stopwatch = stops, Stopwatch()
        self._resumed_otherwise: tuple[Decision, ...] = ()
        self._about_data: tuple[Decision, ...] = ()
        self._memory = assignment.memory
        self._hosts = hosts_of(processes) if assignment.peers else None
        self._first = processes.rank == 0
        self._screen = Screen(json=assignment.request.json) if self._first else None
        warn = print_warning if self._screen is None else self._screen.warn
        self._journal = Journal(run.journal(processes.rank), processes.rank, warn)
        url = prepared.config.checkpoint.mirror
        self._mirror = None if url is None else Mirror(url, run.id, prepared.config.guard.elsewhere_seconds)

    def go(self, log_bytes: int) -> int:
        """Train to the end; the exit code. `log_bytes`: what this rank's log has of earlier attempts."""
        try:
            self._tell_start(log_bytes)
            ending = self._train()
        finally:
            self._journal.close()
        if self._screen is not None:
            self._screen.close_run(self._run, self._prepared.task, ending)
        return EXIT_CODES[ending.reason]

    def _train(self) -> Ending:
        config = self._prepared.config
        try:
            near = (self._memory, self._hosts, self._mirror)
            told = (self._tell_of, heartbeat.current().progress)
            checkpoint, skipped = find_starting_point(self._run, self._processes, *near, *told)
            session = assemble(
                self._prepared.task,
                config,
                self._processes,
                self._stopwatch,
                self._stops.seen,
                kept_schedule=kept_schedule(checkpoint, config.schedule),
            )
            found = compare_data(session.stream, checkpoint, self._processes, config.guard.data)
            self._about_data = tell_data(found, self._warn)
            contents = Contents.of_session(session, config.schedule, found.fingerprint)
            ending = self._loop(session, contents, self._resume(contents, checkpoint, skipped), checkpoint)
        except BaseException as error:
            death = worker_death(error)  # of a process that loads: torch's signal handler raises it wherever this is
            note_error(death or error)
            self._tell_end("failed", death or error)
            if death is not None:
                raise death from error
            raise
        self._tell_end("done" if ending.reason == "done" else "stopped", None)
        self._journal.flush()
        return ending

    def _tell_of(self, brought: str, wrong: Sequence[str], remedy: str) -> None:
        for reason in wrong:
            self._warn(reason, remedy)
        if brought and self._screen is not None:
            self._screen.say(brought)

    def _loop(self, session: Session, contents: Contents, resumed_step: int, checkpoint: Checkpoint | None) -> Ending:
        config, run = self._prepared.config, self._run
        mirroring = None
        if self._mirror is not None and self._first:
            saves = config.checkpoint
            warn = partial(self._warn, remedy=OPEN_MIRROR)
            mirroring = Mirroring(self._mirror, saves.keep, saves.keep_every, warn)
            if checkpoint is not None and checkpoint.path.parent == run.checkpoints:
                mirroring.bring(checkpoint)  # who saved it may have died before it was there
        place = (config.checkpoint, run.checkpoints, run.id, run.attempts)
        saver = Saver(contents, self._processes, *place, self._warn, mirroring)
        if checkpoint is not None and resumed_step > 0 and not lies_in(self._memory, checkpoint):
            saver.go_on_from(checkpoint)
        memory = None
        if self._memory is not None and config.checkpoint.memory_every is not None:
            refuses = self._assignment.first_attempt in (None, run.attempts)
            near = (self._memory, checkpoint, self._hosts)
            memory = MemoryCopies(saver, self._processes, *near, refuses=refuses)
        recorder = progress = None
        if self._screen is not None:
            told = (*self._prepared.decisions, *self._assignment.decisions)
            decisions = (*told, *session.decisions, *self._resumed_otherwise, *self._about_data, *saver.decisions)
            for decision in decisions:
                self._journal.write("decision", what=decision.what, because=decision.because)
            if config.train.steps is None:
                self._journal.write("plan", total_steps=session.stream.steps_total)
            for told_of in told_at_start(run, session.stream):
                self._journal.write("left_out", **told_of)
            self._screen.open_run(run, session, decisions)
            progress = ProgressLine(session.stream.steps_total, first_step=resumed_step, console=self._screen.console)
            recorder = Recorder(
                self._journal,
                tensorboard=run.tensorboard if config.track.tensorboard else None,
                purge_from=resumed_step + 1 if run.attempts > 1 else None,
                memory=lambda: peak_memory_bytes(*self._processes.devices),
                inline=self._processes.device.type == "cpu",
            )
        try:
            leave_out = partial(add_range, run)
            kept = (recorder, progress, leave_out, memory, self._assignment.began)
            return Trainer(session, saver, self._stopwatch, *kept).train()
        except GuardError:
            forsake(self._memory, self._processes.rank, self._hosts, self._run.checkpoints)
            raise
        except Exception as error:
            if is_shortage(error):
                raise explain_shortage(session, error) from error
            raise
        finally:
            if progress is not None:
                progress.close()
            if recorder is not None:
                recorder.close()

    def _resume(self, contents: Contents, checkpoint: Checkpoint | None, skipped: list[str]) -> int:
        """Take the checkpoint's state, if there is one; the step at which it stands, or 0."""
        if self._screen is not None:
            for line in resume_warnings(self._run.checkpoints, checkpoint, skipped, self._run.attempts):
                self._screen.warn(line)
        if checkpoint is None:
            return 0
        self._resumed_otherwise = contents.load(checkpoint)
        manifest = checkpoint.manifest
        heartbeat.current().resumed(manifest.step)
        fault_points.begin_step(manifest.step)
        if self._screen is not None:
            tier = "memory" if lies_in(self._memory, checkpoint) else "disk"
            path, where = checkpoint.path.name, tell_tier(self._memory, checkpoint, self._run.checkpoints)
            self._journal.write("resume", step=manifest.step, samples=manifest.samples, path=path, tier=tier)
            self._screen.say(f"resumed at step {manifest.step:,}, sample {manifest.samples:,}, from {path}{where}")
        fault_points.reach("resume")
        return manifest.step

    def _warn(self, line: str, remedy: str = FREE_CHECKPOINTS) -> None:
        """Rank 0: what goes wrong without ending the run, on the screen and for the report."""
        if self._screen is not None:
            self._journal.write("verdict", kind="checkpoint", what=line, evidence=[], next=remedy)
            self._screen.warn(line)

    def _tell_start(self, log_bytes: int) -> None:
        environment, processes = self._processes.environment, self._processes
        self._journal.write(
            "start",
            rank=processes.rank,
            local_rank=environment.local_rank,
            world_size=processes.size,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(processes.device),
            layout=str(processes.mesh.layout),
            attempt=self._run.attempts,
            total_steps=self._prepared.config.train.steps,
            log_bytes=log_bytes,
        )

    def _tell_end(self, reason: str, error: BaseException | None) -> None:
        memory = peak_memory_bytes(*self._processes.devices)
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._journal.write("end", reason=reason, seconds=self._stopwatch.totals(), memory_bytes=memory, error=text)


def _prepared(assignment: Assignment) -> Prepared:
    if assignment.run is None:
        return prepare(assignment.request)
    run = Run.open(assignment.run)
    _check_attempt(run)
    return Prepared(run.config(), run.task, task_of_run(run), run)


def _check_attempt(run: Run) -> None:
    """See that this process is of the attempt under way: its host may have been frozen since it was told of which."""
    told = os.environ.get(ATTEMPT, "0")
    if told not in ("0", str(run.attempts)):
        raise ProcessError(
            f"this worker is of attempt {told}; attempt {run.attempts} of {run.path} has begun meanwhile"
        )
