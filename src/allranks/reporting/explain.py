"""Why a run died, from its directory or from any log: what is known for certain first, then what signatures tell."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, final

from allranks.errors import ConfigError
from allranks.failure import STOPS, Failure, first_failure, read_failures
from allranks.own_loops import start_again
from allranks.reporting.report import Report, report
from allranks.reporting.signatures import E1, SIGNATURES, Signature
from allranks.run import Run
from allranks.units import format_moment
from allranks.verdict import Verdict

MAX_LINE = 4000
MAX_LINES = 2000
RANK_DIGITS = 6
NAMED_RANKS = 16
LONGEST_EXCERPT = 200
MAX_KEPT = 1000
NOT_VERDICTS = ("restart", "goes_on", "join", "leave")  # what the supervisor did, rather than what was wrong
GENERAL = "from general knowledge: cause and remedy were not reproduced here"

_RANK = re.compile(r"\[\s*[Rr]ank\s*(\d+)\s*\]|\brank(\d+)\]|local_rank: (\d+)")


@final
@dataclass(frozen=True, slots=True)
class Sighting:
    """A signature in a log: where it was seen first, how often, and on which ranks as far as the lines say.

    Attributes:
        place: the number of the line, from 1.
        groups: what the pattern's groups caught, at each sighting, with the rank (None: the line names none).
    """

    signature: Signature
    file: Path
    place: int
    excerpt: str
    count: int
    groups: tuple[tuple[int | None, tuple[str, ...]], ...]


def explain(path: Path) -> list[Verdict]:
    """What is known of how the run in `path` ended, or the program whose log it is; the cause first, [] for nothing.

    Raises:
        ConfigError: there is nothing to read.
        RunError: a directory that is no run.
    """
    if path.is_file():
        return explain_log(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory; give a run's directory or a log")
    return explain_run(Run.open(path))


def explain_run(run: Run) -> list[Verdict]:
    """What the supervisor found, how the workers say they failed, and what their logs show."""
    found = [_as_verdict(event) for event in run.events() if _is_finding(event)]
    found.reverse()  # the newest ended it
    failure = first_failure(one for one in read_failures(run.log().parent) if one.exit_code not in STOPS)
    if failure is not None:
        found.insert(0, _of_failure(failure, run))
    logs = sorted(log for log in run.log().parent.glob("rank-*.log") if log.is_file())
    known = {verdict.kind for verdict in found}
    seen = [one for log in logs for one in explain_log(log) if one.kind not in known]
    found += list({one.kind: one for one in reversed(seen)}.values())[::-1]
    return found or _of_state(report(run))


def explain_silence(path: Path) -> str:
    """What is said where `explain` finds nothing: of a run that goes on or has ended well, that."""
    nothing = f"{path}: nothing in it that allranks knows"
    if path.is_file():
        return nothing
    told = report(Run.open(path))
    return f"{nothing}; the run is {told.state}: {told.because}"


def _of_state(told: Report) -> list[Verdict]:
    """What the report says of a run that ended before its last step, where nothing in it says why."""
    if told.state in ("done", "running"):
        return []
    evidence = [f"{told.path}: step {told.step}" + (f" of {told.total_steps}" if told.total_steps else "")]
    if told.attempts:
        newest = told.attempts[-1]
        evidence.append(f"attempt {newest.number} on {newest.host}; its last line: {format_moment(newest.ended)}")
    if told.error is not None:
        evidence.append(told.error)
    saved = next((kept.name for kept in reversed(told.checkpoints) if kept.committed), None)
    evidence.append(f"newest checkpoint: {saved or 'none was committed'}")
    move = start_again(told.task, told.path) if saved else "start again: there is nothing to go on from"
    return [Verdict(told.state, told.because, tuple(evidence), move)]


def _is_finding(event: dict[str, object]) -> bool:
    return event["event"] == "verdict" and event.get("kind") not in NOT_VERDICTS


def _as_verdict(event: dict[str, object]) -> Verdict:
    lines = event.get("evidence")
    evidence = tuple(str(line) for line in lines) if isinstance(lines, list) else ()
    return Verdict(str(event.get("kind")), str(event.get("what")), evidence, str(event.get("next")))


def _of_failure(failure: Failure, run: Run) -> Verdict:
    lines = [line[:MAX_LINE] for line in failure.message.splitlines()[:MAX_LINES]]
    signature = next((one for one in SIGNATURES if any(map(one.regex.search, lines))), None)
    move = signature.next if signature is not None else f"look at its log: {run.log(failure.rank)}"
    evidence = tuple(failure.traceback.rstrip().splitlines()) if failure.traceback else (failure.message,)
    return Verdict("crash" if signature is None else signature.name, failure.brief(), evidence, move)


def explain_log(path: Path) -> list[Verdict]:
    """One verdict for each signature in a log; causes before consequences, otherwise by place.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            sightings = find_signatures(path, _lines(file))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; give a run's directory or a log"
        ) from error
    names = {one.signature.name for one in sightings}
    sightings = [one for one in sightings if not one.signature.beside or names & set(one.signature.beside)]
    ordered = sorted(sightings, key=lambda one: (one.signature.consequence, one.place))
    return [_describe(one) for one in ordered]


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, of long ones the beginning: one without an end is never in memory as a whole."""
    while line := file.readline(MAX_LINE):
        yield line
        while line and not line.endswith("\n"):
            line = file.readline(MAX_LINE)


def find_signatures(path: Path, lines: Iterable[str]) -> list[Sighting]:
    """Every signature in the lines of a log, once; the first that fits a line has it."""
    found: dict[str, Sighting] = {}
    for place, line in enumerate(lines, 1):
        text = line[:MAX_LINE]
        for signature in SIGNATURES:
            match = signature.regex.search(text)
            if match is not None:
                told = (_rank_of(text), tuple(group or "" for group in match.groups()))
                new = Sighting(signature, path, place, text.strip()[:LONGEST_EXCERPT], 0, ())
                before = found.get(signature.name, new)
                groups = (*before.groups, told)[:MAX_KEPT]
                found[signature.name] = replace(before, count=before.count + 1, groups=groups)
                break
    return list(found.values())


def _rank_of(text: str) -> int | None:
    match = _RANK.search(text)
    if match is None:
        return None
    digits = next(filter(None, match.groups()))
    return int(digits) if len(digits) <= RANK_DIGITS else None


def _describe(one: Sighting) -> Verdict:
    signature = one.signature
    words = ("", *one.groups[0][1])
    evidence = [f"{one.file}:{one.place}: {one.excerpt}"]
    if one.count > 1:
        evidence.append(f"{one.count} times in this log")
    if signature.known == "general":
        evidence.append(GENERAL)
    what, move = signature.what.format(*words), signature.next.format(*words)
    if signature is E1:
        what, move = _compare_ranks(one.groups, what, move)
    return Verdict(signature.name, what, tuple(evidence), move)


def _compare_ranks(groups: Sequence[tuple[int | None, tuple[str, ...]]], what: str, move: str) -> tuple[str, str]:
    """What the timeouts of several ranks say together (E1)."""
    by_rank = {rank: told for rank, told in groups if rank is not None}
    if len(by_rank) < 2:
        return what, move
    if len(set(by_rank.values())) > 1:
        calls = ", ".join(f"rank {rank} in {op} number {seq}" for rank, (seq, op, _) in sorted(by_rank.items()))
        return (
            f"the ranks waited in different collectives: {calls}",
            "find the first call that is not made by all ranks alike: something in it depends on the rank or its data",
        )
    missing = sorted(set(range(max(by_rank) + 1)) - set(by_rank))
    if missing:
        more = f" and {len(missing) - NAMED_RANKS} more" if len(missing) > NAMED_RANKS else ""
        names = ", ".join(map(str, missing[:NAMED_RANKS])) + more
        return f"{what}: rank {names} did not come", f"rank {names} died or stands in code of its own: look at its log"
    _, _, size = next(iter(by_rank.values()))
    if size == "1":
        return f"{what}: all ranks alike", "one value: a barrier, a metric or an early stop; see who makes it, and when"
    return f"{what}: all ranks alike", "the same call everywhere: look at network and GPUs (`allranks doctor`)"
