"""Verify run on every program of a folder, one after another; what is known of this very source is not run again."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, final

from allranks.errors import AllranksError, ConfigError
from allranks.request import TrainRequest
from allranks.verifying.corpus import Entry, read_run
from allranks.verifying.score import Result, Score

if TYPE_CHECKING:
    from allranks.verifying.answer import Answer

SOURCE = Path(__file__).parents[1]
MOST_WORDS = 240
Verify = Callable[[TrainRequest, int], "Answer"]


@final
@dataclass
class Record:
    """Results in a file, one JSON document a line, so that a run which is stopped has lost only its last program."""

    path: Path | None
    _known: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what is there; a line that is cut short is left out."""
        if self.path is None or not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                document = json.loads(line)
                self._known[document["digest"]] = Result.from_json(document)
            except (ValueError, KeyError, TypeError):
                continue

    def get(self, digest: str) -> Result | None:
        """The result of a run with this digest."""
        return self._known.get(digest)

    def add(self, digest: str, result: Result) -> None:
        """Keep a result. Raises ConfigError where the file cannot be written."""
        self._known[digest] = result
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"digest": digest} | result.to_json()) + "\n")
        except OSError as error:
            raise ConfigError(f"--record {self.path}: {error.strerror}; choose another file") from error


def run_all(entries: Sequence[Entry], record: Record, verify: Verify) -> Iterator[tuple[Result, bool]]:
    """(result, whether it was known) of every run of every program, in their order."""
    for entry in entries:
        if entry.unseen:
            yield Result(entry.name, entry.kind, "", None, said=entry.unseen, twin=entry.twin, what=entry.what), True
        for words in entry.runs:
            digest = digest_of(entry, words)
            known = record.get(digest)
            if known is None:
                result = run_one(entry, words, verify)
                record.add(digest, result)
                yield result, False
            else:
                yield known, True


def run_one(entry: Entry, words: str, verify: Verify) -> Result:
    """Verify one program in one way; what it refuses is a result too."""
    request, steps = read_run(entry, words)
    begun = time.monotonic()

    def result(exit_code: int, said: str, kinds: tuple[str, ...] = ()) -> Result:
        seconds = round(time.monotonic() - begun, 1)
        short = said if len(said) <= MOST_WORDS else said[: MOST_WORDS - 3] + "..."
        return Result(entry.name, entry.kind, words, exit_code, kinds, short, seconds, entry.twin, entry.what)

    try:
        answer = verify(request, steps)
    except AllranksError as error:
        for_it = bool(entry.refused) and entry.refused in str(error)
        return replace(result(error.exit_code, str(error)), refused_for_it=for_it)
    verdict = answer.unverified or (answer.findings[0].verdict if answer.findings else None)
    why = "" if verdict is None else verdict.what
    if answer.unverified is not None:
        why = "; ".join([why, *answer.unverified.evidence[:2]])
    return result(answer.exit_code, why, tuple(finding.verdict.kind for finding in answer.findings))


def digest_of(entry: Entry, words: str) -> str:
    """A digest of all that a result depends on: the program, how it is run, and allranks itself."""
    parts = [entry.path.read_bytes(), words.encode(), source_digest().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@cache
def source_digest() -> str:
    """A digest of every Python file of allranks."""
    found = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        found.update(str(path.relative_to(SOURCE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def document_of(
    results: Sequence[Result], score: Score, machine: Mapping[str, object], known: int
) -> dict[str, object]:
    """What `--json` prints, and what the table in the documentation is made of.

    Args:
        results: in the order of the table.
        score: their counts.
        machine: what they were found on, `benchmarking.machine.describe_machine`'s.
        known: how many of them an earlier run of this very source has found.
    """
    rows = [result.to_json() for result in results]
    return {"machine": dict(machine), "known": known, "score": score.to_json(), "results": rows}
