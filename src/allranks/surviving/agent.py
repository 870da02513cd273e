"""Torchelastic's agent inside the command: it starts the workers of this host, waits, and says how it ended.

Torchelastic brings rendezvous, ranks and restarts (SimpleElasticAgent); the processes are ours, because its own reads
pickles from a shared folder, gives a dying worker 30 s, and knows no agreed stop.
Importing this module imports torch: start the fork server first.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from allranks.errors import ProcessError
from allranks.failure import RAISED, TRANSIENT, Failure, clear_failures, clear_unfinished, read_failures
from allranks.surviving.child import Entry, WorkerStart
from allranks.surviving.forkserver import StartMethod, choose_start_method
from allranks.surviving.hosts.company import Company
from allranks.surviving.hosts.ending import RunEnded
from allranks.surviving.hosts.member import Member
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.memory_kill import RecentKills
from allranks.surviving.nccl_abort import NcclAborts
from allranks.surviving.outcome import Ended, Outcome, conclude, conclude_left
from allranks.surviving.rendezvous import LocalRendezvous
from allranks.surviving.supervisor import Supervision, Supervisor
from allranks.surviving.worker_start import start_of
from allranks.surviving.workers import LocalWorkers

ROLE = "allranks"
WAIT_SECONDS = 0.25  # how late a deadline is noticed; a worker's end is noticed at once
BETWEEN_WAITS_SECONDS = 0.001  # torchelastic insists on sleeping between two looks
LINGER_SECONDS = 2.0  # after a failure: time for the others to record theirs
STOP_GRACE_SECONDS = 60.0  # after a request to stop: time to finish the step and save
RESTARTABLE = (RAISED, TRANSIENT)


def run_workers(
    entry: Entry,
    args: tuple[Any, ...] = (),
    *,
    nproc: int,
    run_id: str,
    log_dir: Path,
    max_restarts: int = 0,
    start_method: StartMethod | None = None,
    environ: Mapping[str, str] | None = None,
    replies: bool = False,
    stop_grace_seconds: float = STOP_GRACE_SECONDS,
    stop_notice: str = "",
    supervision: Supervision | None = None,
    company: Company | None = None,
) -> Outcome:
    """Run `entry(*args)` in `nproc` processes of this host, each with the environment of torchrun, to the last exit.

    Ctrl-C and SIGTERM are passed on once, for an agreed stop; the second one, or the end of the grace, kills.

    Args:
        entry: a function, or its name as "package.module:function"; it returns an exit code (None: 0).
        run_id: names the run in the workers' environment.
        log_dir: an existing folder for the failure records of this run; those of earlier attempts are removed.
        max_restarts: how often all workers are started again after a failure, where there is no `supervision`.
        start_method: as `choose_start_method` gives it, which is called where this is None.
        environ: further variables of the workers.
        replies: give each worker a pipe as the entry's last argument; what it sends is in the Outcome.
        stop_notice: what to tell the user, on standard error, when the first request to stop has been passed on.
        supervision: watch the workers, and start them again by its rules; None: neither.
        company: the other hosts of this run, whose workers are of the same world; None: this host is alone.

    Raises:
        ProcessError: the other hosts did not come, or the one that leads has gone.
    """
    agent = LocalAgent(
        entry,
        args,
        spec=_spec(nproc, max_restarts, LocalRendezvous(run_id) if company is None else company),
        company=company,
        supervisor=None if supervision is None else Supervisor(supervision, nproc, log_dir),
        log_dir=log_dir,
        method=start_method or choose_start_method(environ or {}),
        environ=dict(environ or {}),
        replies=replies,
        stop_grace_seconds=stop_grace_seconds,
        stop_notice=stop_notice,
    )
    with agent.interrupts:
        try:
            agent.run(ROLE)
        except RunEnded as ended:
            return ended.ending.outcome()
        finally:
            agent.tidy()
    return agent.last_outcome()


def _spec(nproc: int, max_restarts: int, handler: RendezvousHandler) -> WorkerSpec:
    return WorkerSpec(
        role=ROLE,
        local_world_size=nproc,
        rdzv_handler=handler,
        entrypoint="allranks",  # a name for torchelastic's events; LocalAgent knows what to start
        max_restarts=max_restarts,
        monitor_interval=BETWEEN_WAITS_SECONDS,
    )


@final
class LocalAgent(SimpleElasticAgent):
    """The agent of one host. The four methods that torchelastic leaves abstract are its processes."""

    def __init__(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        *,
        spec: WorkerSpec,
        company: Company | None,
        supervisor: Supervisor | None,
        log_dir: Path,
        method: StartMethod,
        environ: dict[str, str],
        replies: bool,
        stop_grace_seconds: float,
        stop_notice: str,
    ) -> None:
        super().__init__(spec)
        self.interrupts = Interrupts(self._pass_on)
        self._supervisor = supervisor
        self._member = None if company is None else Member(company, supervisor, self.interrupts, spec)
        self._hang: Failure | None = None
        self._attempt = 0
        self._memory_kills = RecentKills()
        self._aborts = NcclAborts(log_dir)
        self._work = (entry, args)
        self._log_dir = log_dir
        self._method = method
        self._environ = environ
        self._replies = replies
        self._stop_grace_seconds = stop_grace_seconds
        self._stop_notice = stop_notice
        self._workers: LocalWorkers | None = None
        self._kill_at: float | None = None
        self._ranks: list[int] | None = None if company is None else []  # of a host that never trains: none

    def tidy(self) -> None:
        """Remove what the last workers were in the middle of writing when they ended; their ranks go to others."""
        clear_unfinished(self._log_dir, self._ranks)
        self._ranks = None if self._member is None else []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        self._ranks = None if self._member is None else ranks
        clear_failures(self._log_dir, self._ranks, worker_group.workers[0].world_size if ranks else None)
        environ = self._environ | ({} if self._member is None else self._member.begin())
        self._kill_at = self._hang = None
        if self._supervisor is not None:
            self._supervisor.begin_attempt(len(ranks))
        if self._workers is not None and self._method.name == "forkserver" and self._workers.lost_their_server:
            self._method = choose_start_method(self._environ)
        beats = "" if self._supervisor is None else self._supervisor.monitor.beats.path
        fixed = WorkerStart(-1, os.getpid(), environ, Path.cwd(), self._log_dir.absolute(), 0, *self._work, beats)
        self._aborts = NcclAborts(self._log_dir, ranks)
        starts = [start_of(worker, worker_group, self._attempt, fixed) for worker in worker_group.workers]
        self._workers = LocalWorkers(self._method.name, starts, replies=self._replies)
        self._attempt, self._memory_kills = self._attempt + 1, RecentKills()
        if self.interrupts.first is not None:
            self._pass_on()
        return dict(self._workers.pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        workers = self._existing_workers()
        if not (ended_before := len(workers.exits)):
            self._memory_kills.look()
        workers.wait(WAIT_SECONDS)
        if len(workers.exits) > ended_before:
            self._set_deadline(workers)
        living = {place: workers.pids[place] for place in workers.alive}
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if self._member is not None and (seconds := self._member.look(living, ranks)) is not None:
            self._hasten(seconds)
        if self._member is not None and living and self._member.admits():
            workers.signal(signal.SIGTERM)  # they agree with those of all hosts on the step after which they save
        if self.interrupts.first is not None and self._stop_notice:
            print(self._stop_notice, file=sys.stderr, flush=True)
            self._stop_notice = ""
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            workers.kill()
        elif self._member is not None and living and self._kill_at is None:
            self._member.watch(living, ranks)
        elif self._supervisor is not None and living and self._kill_at is None:
            self._hang = self._supervisor.look(living, ranks)
            if self._hang is not None:
                workers.kill()
        if workers.alive:
            return RunResult(WorkerState.HEALTHY)
        if self._member is not None:
            following = self._member.settle(self.outcome())
            if following == "wait":
                return RunResult(WorkerState.HEALTHY)
            if following == "again" and workers.left is not None:
                raise ProcessError(workers.left.render())  # this host leaves the others
            self._remaining_restarts = int(following == "again")
            self.tidy()
            return RunResult(WorkerState.FAILED)  # torchelastic's word for all that is no end of one host alone
        if not any(one.code or one.failed for one in self._ended()):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks.values()))
        self._remaining_restarts = self._restarts_left()
        return RunResult(WorkerState.FAILED)

    def _restarts_left(self) -> int:
        """How often workers may be started again after they have failed now."""
        outcome = self.outcome()
        if self.interrupts.first is not None or self._existing_workers().left is not None:
            return 0
        if self._supervisor is None:
            return self._remaining_restarts if outcome.exit_code in RESTARTABLE else 0
        failure = outcome.first_failure
        if failure is None or not self._supervisor.may_restart(failure):
            return 0
        self._supervisor.restarting(failure)
        return 1

    def _set_deadline(self, workers: LocalWorkers) -> None:
        """The first that stops gives the others time to save; the first that fails, time to say why they fail.

        Who was killed by a signal is the cause: what the others would say is its consequence.
        """
        ended = self._ended()
        if min((one.code for one in ended), default=0) < 0 and self._supervisor is not None:
            workers.kill()
        elif any(one.failed for one in ended):
            self._hasten(LINGER_SECONDS)
        elif any(one.code for one in ended):
            self._hasten(self._stop_grace_seconds)

    def _hasten(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def _pass_on(self) -> None:
        """A request to stop came, perhaps in the middle of anything: only signals and deadlines here."""
        if self._workers is None or self.interrupts.first is None:
            return
        if self.interrupts.urgent:
            self._workers.signal(signal.SIGKILL)
            self._hasten(0.0)  # which waits for them, though not without end
        else:
            self._workers.signal(self.interrupts.first)
            self._hasten(self._stop_grace_seconds)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._existing_workers().kill()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._workers is not None:
            self._workers.kill()

    def _existing_workers(self) -> LocalWorkers:
        assert self._workers is not None, "torchelastic starts workers before it looks at them"
        return self._workers

    def last_outcome(self) -> Outcome:
        """How the run ended, after its last attempt."""
        outcome = self.outcome() if self._member is None else self._member.outcome or self.outcome()
        if self._supervisor is None:
            return outcome
        self._supervisor.monitor.beats.close()
        if self._member is not None or self._existing_workers().left is not None:
            return outcome
        if outcome.first_failure is None or self.interrupts.first is not None:
            return outcome
        failure = self._supervisor.conclude(outcome.first_failure)
        return replace(outcome, first_failure=failure, exit_code=failure.exit_code)

    def outcome(self) -> Outcome:
        """How the workers of the last attempt ended."""
        workers = self._existing_workers()
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        replies = {ranks[place]: reply for place, reply in workers.replies.items()}
        ended, hang = self._ended(), [] if self._hang is None else [self._hang]
        records = [*self._aborts.decode(ended), *read_failures(self._log_dir), *hang]
        outcome = conclude(ended, records, self.interrupts.first, replies)
        if outcome.first_failure is not None:
            outcome = replace(outcome, first_failure=self._memory_kills.decode(outcome.first_failure))
        return outcome if workers.left is None else conclude_left(outcome, workers.left)

    def _ended(self) -> list[Ended]:
        return self._existing_workers().ended(None if self._supervisor is None else self._supervisor.monitor.beats)
