"""Why a run died, from its directory or from any log: what is known for certain first, then what signatures tell."""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TextIO, final

from allranks.errors import ConfigError
from allranks.failure import STOPS, Failure, first_failure, read_failures
from allranks.own_loops import start_again
from allranks.reporting.history import Event, find_attempts, peak_memory
from allranks.reporting.last_attempt import Part, find_logs, find_parts
from allranks.reporting.log_figures import LogFigures, describe_pieces, tell_memory
from allranks.reporting.report import Report, report
from allranks.reporting.signature import Signature
from allranks.reporting.signatures import E1, SIGNATURES
from allranks.reporting.timeouts import Job, Timeouts, compare
from allranks.run import Run
from allranks.units import format_moment
from allranks.verdict import Verdict

MAX_LINE = 4000
MAX_LINES = 2000
READ_BYTES = 1 << 20
LONGEST_EXCERPT = 200
NOT_VERDICTS = ("restart", "goes_on", "join", "leave", "spare")  # what the supervisor did, rather than what was wrong
NCCLS_WORDS = "NCCL INFO"
GENERAL = "from general knowledge: cause and remedy were not reproduced here"


@final
@dataclass(frozen=True, slots=True)
class Sighting:
    """A signature in a log: where it was seen first, and how often.

    Attributes:
        place: the number of the line, from 1; of a signature that is to be the last word, of its newest.
        words: what the pattern's groups caught there.
    """

    signature: Signature
    file: Path
    place: int
    excerpt: str
    count: int
    words: tuple[str, ...]


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
    events, told = run.events(), report(run)
    found = [_as_verdict(event) for event in events if _is_finding(event)]
    found.reverse()  # the newest ended it
    failures = [one for one in read_failures(run.log().parent) if one.exit_code not in STOPS]
    failure = None if told.state == "done" else first_failure(failures)
    if failure is None and not _found_after_its_steps(events):
        found = [*_of_state(told), *found]  # what stands there was lived through
    if failure is not None:
        found.insert(0, _of_failure(failure, run))
    parts = find_parts(run)
    known = {verdict.kind for verdict in found}
    timeouts, of_any_attempt = Timeouts(), Timeouts()
    figures = _figures_of(run)
    sightings = []
    for log in find_logs(run, parts):
        sightings += _read(log.path, timeouts if log.apart else of_any_attempt, figures, log.begin)
    together = compare(timeouts.newest(), _job(run, parts, failures))
    # A rank's log may well end in NCCL's words while it trains: the supervisor has seen whether it hung.
    sightings = [one for one in sightings if one.signature.name not in known and not one.signature.last]
    seen = [_describe(one, together, figures) for one in sightings]
    found += list({one.kind: one for one in reversed(seen)}.values())[::-1]
    if failure is not None:
        found[0] = _with_figures(found[0], figures, run, failure)
    return found or _of_state(told)


def _found_after_its_steps(events: Sequence[Event]) -> bool:
    """Whether something was found behind the newest attempt's last step, or with nothing of an attempt at all."""
    last = max((at for at, event in enumerate(events) if event["event"] in ("start", "step")), default=-1)
    return any(map(_is_finding, events[last + 1 :]))


def _figures_of(run: Run) -> LogFigures:
    """What the supervisor wrote of each restart: who failed in the starts before the newest."""
    figures = LogFigures()
    for event in run.events():
        if event["event"] == "verdict" and event.get("kind") == "restart":
            figures.read(str(event.get("what")))
            figures.next_start()
    return figures


def _with_figures(found: Verdict, figures: LogFigures, run: Run, failure: Failure) -> Verdict:
    """The first failing rank's verdict: what workers needed of their host, where that may be why; who failed again."""
    if found.kind == "E4":
        attempts = find_attempts(run.events())
        journals = {rank: run.events(rank) for rank in run.ranks()}
        on_host = [rank for rank, events in journals.items() if any(e.get("host") == failure.host for e in events)]
        on_cpu = bool(attempts) and attempts[-1].device == "cpu"  # elsewhere the peaks are the device's memory
        peak = max(peak_memory(journals).values(), default=0) if on_cpu else 0
        return replace(found, evidence=(*found.evidence, tell_memory(len(on_host), peak, "the most, by the journals")))
    figures.read(failure.brief())
    return replace(found, evidence=(*found.evidence, *figures.tell(found.kind)))


def _job(run: Run, parts: Mapping[int, Part], failures: Iterable[Failure]) -> Job | None:
    """The newest attempt's ranks; None where nothing tells how many it has."""
    attempts = find_attempts(run.events())
    num_ranks = attempts[-1].world_size if attempts else 1
    if num_ranks == 1:
        return None
    # Of a rank without a word nobody knows whether it waited: it was killed, perhaps by the agent a moment before its
    # own watchdog would have spoken, and what compiled code prints on rank 0 goes to the terminal.
    left = {rank for rank, part in parts.items() if part.reason in ("done", "stopped")}
    left |= {one.rank for one in failures if not one.consequence}
    return Job(num_ranks, frozenset(left), frozenset(one.rank for one in failures if one.consequence))


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


def _is_finding(event: Event) -> bool:
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
    if signature is not None and signature.name == "E13":
        match = next(filter(None, map(signature.regex.search, lines)))
        if (pieces := describe_pieces(match[1], match[2])) is not None:
            evidence, move = (*evidence, pieces[0]), pieces[1]
    return Verdict("crash" if signature is None else signature.name, failure.brief(), evidence, move)


def explain_log(path: Path) -> list[Verdict]:
    """One verdict for each signature in a log; causes before consequences, otherwise by place.

    Raises:
        ConfigError: it cannot be read.
    """
    timeouts, figures = Timeouts(), LogFigures()
    sightings = _read(path, timeouts, figures)
    together = compare(timeouts.newest())
    return [_describe(one, together, figures) for one in sightings]


def _read(path: Path, timeouts: Timeouts, figures: LogFigures, begin: int = 0) -> list[Sighting]:
    """The signatures in a log that say something, in the order in which they are told; from its byte `begin` on."""
    try:
        with path.open("rb") as file, io.TextIOWrapper(file, encoding="utf-8", errors="replace") as text:
            if os.fstat(file.fileno()).st_size < begin:  # somebody has emptied it since
                begin = 0
            first = 1 + _count_line_ends(file, begin)
            sightings = find_signatures(path, figures.passing(timeouts.passing(_lines(text))), first)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; give a run's directory or a log"
        ) from error
    names = {one.signature.name for one in sightings}
    sightings = [one for one in sightings if not one.signature.beside or names & set(one.signature.beside)]
    return sorted(sightings, key=lambda one: (one.signature.consequence, one.place))


def _count_line_ends(file: BinaryIO, num_bytes: int) -> int:
    """Those in the next so many bytes, which are read: as text has them, so that CR and LF together are one."""
    ends, before = 0, b""
    while num_bytes > 0 and (piece := file.read(min(READ_BYTES, num_bytes))):
        num_bytes -= len(piece)
        ends += piece.count(b"\n") + piece.count(b"\r") - (before + piece).count(b"\r\n")
        before = piece[-1:]
    return ends


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, of long ones the beginning: one without an end is never in memory as a whole."""
    while line := file.readline(MAX_LINE):
        yield line
        while line and not line.endswith("\n"):
            line = file.readline(MAX_LINE)


def find_signatures(path: Path, lines: Iterable[str], first: int) -> list[Sighting]:
    """Every signature in the lines of a log, once; the first that fits a line has it. `first`: the first one's number.

    Raises OSError as the reading of the lines does.
    """
    found: dict[str, Sighting] = {}
    last_word = 0
    for place, line in enumerate(lines, first):
        text = line[:MAX_LINE]
        if text.strip() and NCCLS_WORDS not in text:
            last_word = place
        for signature in SIGNATURES:
            match = signature.regex.search(text)
            if match is not None:
                words = tuple(group or "" for group in match.groups())
                new = Sighting(signature, path, place, text.strip()[:LONGEST_EXCERPT], 0, words)
                before = found.get(signature.name, new)
                found[signature.name] = replace(new if signature.last else before, count=before.count + 1)
                break
    return [one for one in found.values() if not one.signature.last or one.place > last_word]


def _describe(one: Sighting, together: tuple[str, str] | None, figures: LogFigures) -> Verdict:
    """The verdict; of NCCL's timeouts what the ranks' say `together`, where they do."""
    signature = one.signature
    words = ("", *one.words)
    evidence = [f"{one.file}:{one.place}: {one.excerpt}"]
    if one.count > 1:
        evidence.append(f"{one.count} times in this log")
    if signature.known == "general":
        evidence.append(GENERAL)
    evidence += figures.tell(signature.name)
    what, move = signature.what.format(*words), signature.next.format(*words)
    if signature.name == "E13":
        what, move = describe_pieces(words[1], words[2]) or (what, move)
    if signature is E1 and together is not None:
        what, move = together
    return Verdict(signature.name, what, tuple(evidence), move)
