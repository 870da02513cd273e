"""What has to hold after a trial, whatever was killed in it: I1 to I7, each with what was compared.

Everything is read from the two Run directories; nothing is taken from the processes' own word but their journals.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.host_memory import left_of
from allranks.errors import CheckpointError
from allranks.run import Run
from allranks.surviving.incidents import Incident
from allranks.surviving.trial_commands import Command, Left

NAMED = 3
LEFTOVER = re.compile(r"\.tmp|^\.trash-|^\.probe-|^failure-")
RECOVERY_SECONDS = 20.0
"""Ten times the worst that a tiny model on an idle machine may take: more is no noise of cores that are shared."""
PASSED_OVER = "passed over a newer checkpoint"


@final
@dataclass(frozen=True, slots=True)
class Invariant:
    """One of the seven.

    Attributes:
        name: I1 ... I7.
        holds: None: it could not be determined.
        what: what was compared, with its numbers; where it does not hold, what differs.
    """

    name: str
    holds: bool | None
    what: str

    def to_json(self) -> dict[str, object]:
        """One JSON object."""
        return asdict(self)


def same_state(reference: Run, broken: Run) -> Invariant:
    """I1: parameters, optimizer and all other state at the end, by the digests of the tensors."""
    ends = [_newest(run) for run in (reference, broken)]
    if ends[0] is None or ends[1] is None:
        return Invariant("I1", None if ends[0] is None else False, "there is no checkpoint of the end to compare")
    one, other = ends[0].manifest, ends[1].manifest
    names = sorted(one.tensors.keys() | other.tensors.keys())
    wrong = [name for name in names if one.tensors.get(name) != other.tensors.get(name)]
    wrong += [key for key in ("step", "samples", "layout") if getattr(one, key) != getattr(other, key)]
    wrong += [] if _kept(one.state) == _kept(other.state) else ["state"]
    if wrong:
        return Invariant("I1", False, f"{len(wrong)} of {len(names)} tensors or facts differ: {_name(wrong)}")
    return Invariant(
        "I1", True, f"all {len(names)} tensors of the last checkpoint are bitwise equal, at step {one.step}"
    )


def _kept(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps beside tensors, but for the samples that there was time to digest (fingerprint.py)."""
    dataset = state.get("dataset")
    told = dict(dataset) if isinstance(dataset, Mapping) else {}
    told.pop("fingerprint", None)
    return {**state, "dataset": told}


def same_samples(reference: Run, broken: Run) -> Invariant:
    """I2: the ledger of every step, those done again too, is that of the undisturbed run; no step is missing.

    A step that both runs have gone back behind, around a spike's samples, has another ledger when it is done again.
    """
    expected = set(map(_fed, reference.steps()))
    ever = {_fed(event) for event in reference.events() if event["event"] == "step"}
    done = [event for event in broken.events() if event["event"] == "step"]
    wrong = [event["step"] for event in done if _fed(event) not in ever]
    wrong = wrong or [event["step"] for event in broken.steps() if _fed(event) not in expected]
    final_steps = [event["step"] for event in broken.steps()]
    if wrong:
        return Invariant("I2", False, f"other samples in {len(wrong)} steps: {_name(wrong)}")
    if len(final_steps) != len(expected):
        missing = sorted({step for step, *_ in expected} - set(final_steps))
        return Invariant("I2", False, f"{len(missing)} steps are missing: {_name(missing)}")
    return Invariant("I2", True, f"every sample once and in order: {len(expected)} ledgers, {len(done)} steps done")


def _fed(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which samples a step fed."""
    return event["step"], event["samples"], event["ledger"]


def sound_checkpoints(broken: Run, commands: Sequence[Command]) -> Invariant:
    """I3: every committed checkpoint verifies, and no start found a bad one."""
    paths = list_checkpoints(broken.checkpoints)
    for path in paths:
        try:
            verify_files(Checkpoint.open(path, broken.id))
        except CheckpointError as error:
            return Invariant("I3", False, str(error))
    passed_over = sum(PASSED_OVER in line for command in commands for line in command.lines())
    if passed_over or not paths:
        return Invariant("I3", False, f"{passed_over} bad checkpoints were passed over; {len(paths)} are there")
    return Invariant("I3", True, f"all {len(paths)} committed checkpoints verify, and no restart passed one over")


def bounded_work(
    incidents: Sequence[Incident],
    every: int | None,
    num_steps: int,
    *,
    beside: bool = False,
    memory_every: int | None = None,
    failures: int = 0,
) -> Invariant:
    """I4: steps done again are at most those between two checkpoints, twice as many where these are written `beside`
    the steps: the one under way does not count yet. So many more as faults have kept from being saved while the run
    went on, at most `failures` in a row.

    With copies in memory every so many steps they are at most those between three of them, because a copy may fail;
    not where they are written beside the steps, which leave out as many copies as come due meanwhile.
    """
    unsaved = sum(incident.recovery == "went on" and bool(incident.causes) for incident in incidents)
    limit = num_steps if every is None else every * ((2 if beside else 1) + min(failures, unsaved))
    if memory_every is not None and not beside:
        limit = min(limit, 2 * memory_every)
    most = max((incident.redone for incident in incidents), default=0)
    total = sum(incident.redone for incident in incidents)
    what = f"{total} steps done again, at most {most} after one fault; a checkpoint every {every or num_steps}"
    what += "" if memory_every is None else f", a copy in memory every {memory_every}"
    return Invariant("I4", most <= limit, what)


def recovered(
    incidents: Sequence[Incident],
    fired: int,
    planned: int,
    *,
    start_seconds: float = 0.0,
    stopped_seconds: float = 0.0,
) -> Invariant:
    """I5: every fault that happened was recovered from, with the seconds to the next finished step, and in time.

    In time: a restart has RECOVERY_SECONDS and what the undisturbed run needed for its first step, `start_seconds`; a
    process that was stopped has the time besides for which it may be, `stopped_seconds`.
    """
    lost = [incident.fault.number for incident in incidents if not incident.recovered]
    if lost:
        return Invariant("I5", False, f"not recovered from {len(lost)} of {fired} faults: number {_name(lost)}")
    if fired < planned:
        return Invariant("I5", None, f"{fired} of {planned} faults happened; the others met nobody")
    seconds = recovery_seconds(incidents)
    if not seconds:
        return Invariant("I5", True, f"recovered from all {fired} faults")
    limit = RECOVERY_SECONDS + start_seconds
    for incident in incidents:
        allowed = limit + (stopped_seconds if incident.fault.kind == "stop" else 0.0)
        if incident.recovery == "restarted" and incident.seconds is not None and incident.seconds > allowed:
            what = f"number {incident.fault.number} took {incident.seconds:.1f} s to the next finished step"
            return Invariant("I5", False, f"{what}; {allowed:.1f} s are allowed")
    median, worst = statistics.median(seconds), max(seconds)
    return Invariant(
        "I5", True, f"recovered from all {fired}: median {median:.2f} s, worst {worst:.2f} s of {limit:.0f}"
    )


def recovery_seconds(incidents: Sequence[Incident]) -> list[float]:
    """From fault to next finished step, where the supervisor did it alone and no other fault came between."""
    found = [incident.seconds for incident in incidents if incident.recovery == "restarted"]
    return [one for one in found if one is not None]


def one_cause_each(incidents: Sequence[Incident]) -> Invariant:
    """I6: one line gives each fault's cause, and names the rank."""
    stopped = [incident for incident in incidents if incident.recovery != "went on"]
    wrong = [incident for incident in stopped if not incident.names_rank()]
    if wrong:
        first = wrong[0]
        told = "; ".join(first.causes) or "nothing"
        what = f"{len(wrong)} of {len(stopped)} causes are not told once and with their rank; of number"
        return Invariant("I6", False, f"{what} {first.fault.number} (rank {first.fault.rank}): {told}")
    return Invariant("I6", True, f"each of {len(stopped)} causes was told once, with its rank")


def nothing_left(broken: Run, left: Left) -> Invariant:
    """I7: no process (so no port), nothing in the folder of temporary files, nothing half-done in the run's, no copy in
    the memory of this host.
    """
    names = [
        str(path.relative_to(broken.path)) for path in sorted(broken.path.rglob("*")) if LEFTOVER.search(path.name)
    ]
    found = [*left.processes, *left.temporary, *names]
    found += [str(path) for path in left_of(broken.id)]
    holder = broken.holder()
    found += [] if holder is None else [f"the lease, held by {holder}"]
    if found:
        return Invariant("I7", False, f"left behind: {_name(found)}")
    return Invariant("I7", True, "no process, no temporary file or folder, no lease left")


def judge(
    reference: Run,
    broken: Run,
    incidents: Sequence[Incident],
    commands: Sequence[Command],
    left: Left,
    numbers: Mapping[str, int],
) -> list[Invariant]:
    """All seven; `numbers`: how many faults were `planned` and `fired`."""
    steps, saving = reference.steps(), broken.config().checkpoint
    guard = broken.config().guard
    num_steps, beside = steps[-1]["step"] if steps else 0, saving.beside(_device(broken))
    return [
        same_state(reference, broken),
        same_samples(reference, broken),
        sound_checkpoints(broken, commands),
        bounded_work(
            incidents,
            saving.every,
            num_steps,
            beside=beside,
            memory_every=saving.memory_every,
            failures=saving.failures,
        ),
        recovered(
            incidents,
            numbers["fired"],
            numbers["planned"],
            start_seconds=_start_seconds(reference),
            stopped_seconds=guard.stopped_seconds,
        ),
        one_cause_each(incidents),
        nothing_left(broken, left),
    ]


def _start_seconds(run: Run) -> float:
    """From the start of a run's first worker to its first finished step; 0.0 where there is none."""
    times = {event["event"]: event["t"] for event in reversed(run.events()) if event["event"] in ("start", "step")}
    return max(0.0, times["step"] - times["start"]) if len(times) == 2 else 0.0


def _device(run: Run) -> str:
    """The type of device that it has run on."""
    start = next((event for event in run.events() if event["event"] == "start"), {"device": "cpu"})
    return str(start["device"]).partition(":")[0]


def _newest(run: Run) -> Checkpoint | None:
    paths = list_checkpoints(run.checkpoints)
    return Checkpoint.open(paths[0], run.id) if paths else None


def _name(found: Sequence[Any]) -> str:
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(map(str, found[:NAMED])) + more
