"""How a run on several hosts ends: one word that holds for all of them, and what a host says before it."""

from dataclasses import asdict, dataclass, field, replace
from typing import final

from allranks.errors import ProcessError
from allranks.failure import Failure
from allranks.surviving.hosts.seal import Json
from allranks.surviving.outcome import Outcome

# of each of three texts that travel: etcd takes at most 1.5 MiB at once, and JSON needs up to 12 bytes for a character
MOST_CHARACTERS = 30_000


@final
@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the run on every host: its commands' exit code, and the first failure or a line, or neither."""

    exit_code: int
    failure: Failure | None = None
    message: str = ""

    def to_json(self) -> Json:
        """One JSON object."""
        return asdict(replace(self, failure=_shorten(self.failure), message=_cut(self.message)))

    def outcome(self) -> Outcome:
        """The same as the Outcome of one host. Raises ProcessError where a line is all there is to say."""
        if self.message:
            raise ProcessError(self.message)
        return Outcome(self.exit_code, self.failure)

    @classmethod
    def from_json(cls, value: Json) -> "Ending":
        """What `to_json` gave, on whichever host."""
        return cls(value["exit_code"], _read_failure(value["failure"]), value["message"])


@final
@dataclass(frozen=True, slots=True)
class Report:
    """How one host's workers of one round ended.

    Attributes:
        exit_code: as `outcome.conclude` found it there.
        failure: the first of that host's workers; None: none failed, or all were ended for another host's sake.
        stopped: whether somebody asked that host's command to stop.
        age_seconds: how long before the report was posted the failure was, by that host's clock.
    """

    exit_code: int
    failure: Failure | None = None
    stopped: bool = False
    age_seconds: float = field(default=0.0, compare=False)

    def posted(self, now: float) -> "Report":
        """The same, as it is posted at `now`, in Unix seconds of the host's own clock."""
        age = 0.0 if self.failure is None else max(0.0, now - self.failure.time)
        return replace(self, age_seconds=age)

    def to_json(self) -> Json:
        """One JSON object."""
        return asdict(replace(self, failure=_shorten(self.failure)))

    @classmethod
    def from_json(cls, value: Json) -> "Report":
        """What `to_json` gave, on whichever host."""
        return cls(value["exit_code"], _read_failure(value["failure"]), value["stopped"], value["age_seconds"])


def _shorten(failure: Failure | None) -> Failure | None:
    if failure is None:
        return None
    return replace(failure, message=_cut(failure.message), traceback=_cut(failure.traceback))


def _cut(text: str) -> str:
    """Without its middle, where it is long: an error's last lines say what it is, its first where."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"


def _read_failure(value: Json) -> Failure | None:
    return None if value is None else Failure(**value)


class RunEnded(Exception):
    """The run has ended for all hosts, while this one waited for the others."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending
