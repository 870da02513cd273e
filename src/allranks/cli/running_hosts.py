"""`allranks train --nodes N`: the command of one host among several, from the meeting to the exit code."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import __version__
from allranks.cli.host_sizes import is_left_to_plan, plan_for_hosts
from allranks.cli.in_workers import DEMO, train_in_workers
from allranks.cli.output import print_error
from allranks.cli.run_ended import Document
from allranks.errors import AllranksError, ConfigError, RunError
from allranks.failure import TRANSIENT, StoppedBeforeStart
from allranks.hosts_request import Endpoint, HostsRequest
from allranks.launching.environment import ProcessEnvironment
from allranks.process_end import end_process
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving.hosts.secret import VARIABLE, take_secret
from allranks.surviving.unended import hinders_the_end
from allranks.verdict import Decision, Verdict

if TYPE_CHECKING:
    from allranks.config_guard import GuardConfig
    from allranks.surviving.hosts.company import Company
    from allranks.surviving.hosts.introduction import Facts
    from allranks.surviving.hosts.place import MeetingPlace
    from allranks.surviving.supervisor import Supervision
    from allranks.training.prepare import Prepared

CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def take_secret_of(request: TrainRequest, environment: ProcessEnvironment) -> bytes:
    """The secret of a request for several hosts, b"" where there is one host; call it before processes start.

    Raises:
        ConfigError: there is none, it is open to others, or something else has started this process.
    """
    if request.hosts is None:
        os.environ.pop(VARIABLE, None)  # workers shall not have it, whatever it was set for
        return b""
    if environment.launcher != "none":
        raise ConfigError(
            f"--nodes starts the workers of this host itself: leave {environment.launcher} out, or leave --nodes out"
        )
    if request.show_sharding:
        raise ConfigError("--show-sharding makes one step on this host: leave --nodes and --rendezvous out")
    if request.show:
        return b""
    return take_secret(request.hosts.secret_file, os.environ)


def import_torch_quietly() -> None:
    """Import torch so that its store says nothing itself, with stacks, when a host is lost: this command does.

    The variable is read at the import, and workers shall not have it.
    """
    kept = os.environ.get(CPP_LOG_LEVEL)
    os.environ[CPP_LOG_LEVEL] = kept or "ERROR"
    try:
        importlib.import_module("torch")
    finally:
        if kept is None:
            del os.environ[CPP_LOG_LEVEL]


def run_on_hosts(
    request: TrainRequest,
    hosts: HostsRequest,
    prepared: "Prepared",
    nproc: int,
    decisions: Sequence[Decision],
    secret: bytes,
) -> tuple[int, Document]:
    """Meet the other hosts, train, and leave: the exit code and what `--json` prints.

    Raises:
        AllranksError: the hosts did not meet, or have not the same code; one line.
    """
    from allranks.checkpointing.host_memory import check_there
    from allranks.surviving.hosts.company import Company
    from allranks.surviving.hosts.greeting import greet
    from allranks.surviving.hosts.meeting import MeetingStore
    from allranks.surviving.hosts.seal import Seal
    from allranks.surviving.peer_memory import open_peer_memory

    copies = prepared.config.checkpoint.memory_every is not None
    if copies:
        check_there()
    guard = prepared.config.guard
    meeting = _meet(hosts.endpoint, guard, secret)
    facts = facts_here(prepared, hosts)
    try:
        if isinstance(meeting, MeetingStore):  # in etcd a meeting has its name from the session
            greet(meeting, secret, guard.join_seconds)
        seal = Seal(secret, meeting.scope)
        company = Company(meeting, seal, nodes=hosts.nodes, least=hosts.least, nproc=nproc, guard=guard, tell=_tell)
        run, decided = _share_run(company, prepared, request, facts, nproc)
        try:
            memory = open_peer_memory(run, wanted=copies)
            supervision = _supervision(run, prepared, company)
            return train_in_workers(request, run, nproc, (*decisions, *decided), supervision, company, memory)
        finally:
            company.leave()
            run.release()
    except AllranksError as error:
        if meeting.stuck or hinders_the_end():
            # The thread that waits for a host that says nothing would take an orderly exit for an accident.
            end_process(print_error(error, json=request.json))
        raise
    except StoppedBeforeStart:
        if meeting.stuck or hinders_the_end():
            end_process(TRANSIENT)
        raise
    finally:
        meeting.close(over=False)


def _meet(endpoint: Endpoint, guard: "GuardConfig", secret: bytes) -> "MeetingPlace":
    from allranks.surviving.hosts.etcd_opening import open_etcd_meeting
    from allranks.surviving.hosts.meeting import open_meeting

    wait, silence = guard.join_seconds, guard.host_seconds
    if endpoint.scheme == "etcd":
        return open_etcd_meeting(endpoint, secret, connect_seconds=wait, seconds=silence, tell=_tell)
    return open_meeting(endpoint, connect_seconds=wait, call_seconds=silence, tell=_tell)


def facts_here(prepared: "Prepared", hosts: HostsRequest) -> "Facts":
    """What this host has, and every other one has to have alike.

    Not what a run changes itself while it goes on, and the leader was started before: what is left out after a
    rollback, and the micro-batch after want of memory. What counts is what the Run directory says, which all workers
    read.
    """
    from allranks.surviving.hosts.introduction import facts_of
    from allranks.training.prepare import CHANGED_BY_RUNS, config_digest

    # A layout that a plan decides is in the config of a host that comes later, and not of those that came before.
    decided = [name for name in prepared.config.flat() if prepared.unnamed and name.startswith("layout.")]
    digest = config_digest(prepared.config, but=(*CHANGED_BY_RUNS, *decided))
    return facts_of(prepared.spec or DEMO, digest, hosts.words, _versions())


def _versions() -> dict[str, str]:
    import torch

    return {"allranks": __version__, "torch": torch.__version__}


def _share_run(
    company: "Company", prepared: "Prepared", request: TrainRequest, facts: "Facts", nproc: int
) -> tuple[Run, tuple[Decision, ...]]:
    """The Run directory: the leader makes or continues it and holds its lease, the others open it.

    What is newer in the leader's memory than on the disk is brought there first. With it, what was decided of the
    layout: the leader plans that of a new run which names none.
    """
    from allranks.surviving.hosts.introduction import announce_plan, introduce, learn
    from allranks.surviving.hosts.losses import LOST
    from allranks.surviving.hosts.succession import succeed
    from allranks.surviving.memory_tier import open_memory
    from allranks.surviving.unanswered import DISK_SECONDS, within
    from allranks.training.prepare import open_run
    from allranks.training.seats import seat_workers

    assert request.hosts is not None
    wait = prepared.config.guard.join_seconds
    decided: tuple[Decision, ...] = ()
    try:
        path = learn(company.notices, facts, request.hosts.endpoint, wait, company.seek, _tell)
        if path is None:
            if is_left_to_plan(prepared, nproc, request.hosts):
                announce_plan(company.notices)
                prepared, decided = plan_for_hosts(prepared, request, request.hosts, nproc)
            run = open_run(prepared, request)
            copies = open_memory(run, wanted=False)
            if copies is not None:
                copies.close()  # what a run on this host alone has left here is for all hosts now
            run.begin_attempt()
            introduce(company.notices, facts, run.path.resolve())
        else:
            run = _open_shared(path)
            company.on_lead = partial(succeed, run, company.notices, facts)
            if company.leads:
                company.succeeded = company.on_lead()
    except LOST as error:
        raise company.explain(error) from error
    company.seating.attempt = lambda: run.attempts
    if request.hosts.least < request.hosts.nodes:
        known = run.config()  # as good, where the disk does not answer while others train
        company.seating.seat = lambda workers: seat_workers(within(DISK_SECONDS, run.config, known), workers)
    return run, decided


def _open_shared(path: Path) -> Run:
    from allranks.checkpointing.looking_again import await_run

    await_run(path)
    try:
        return Run.open(path)
    except RunError as error:
        raise RunError(f"{error}; all hosts need a file system on which they see the same run directory") from error


def _supervision(run: Run, prepared: "Prepared", company: "Company") -> "Supervision":
    from allranks.surviving.supervisor import Supervision
    from allranks.training.shortage import halve_micro_batch

    judged = Supervision.of_run(run, prepared.config.guard, lambda: halve_micro_batch(run, sum(company.table.workers)))

    def tell(verdict: Verdict) -> None:
        """The journal is the leader's."""
        if company.leads:
            judged.tell(verdict)
        else:
            _tell(verdict, sep="\n")

    return replace(judged, tell=tell)


def _tell(line: object, sep: str = "") -> None:
    print(f"{sep}{line}", file=sys.stderr, flush=True)
