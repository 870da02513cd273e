"""How well verify does on programs whose truth is known: what is caught, named rightly, accused falsely."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from allranks.verifying.corpus import CLEAN

CAUGHT, REFUSED, MISSED = "caught", "refused", "missed"
SILENT, FALSE_ALARM = "clean", "false alarm"
UNVERIFIED, UNSEEN = "not verified", "unseen"
EXIT_EQUAL, EXIT_DIFFERS, EXIT_REFUSED = 0, 1, 2


@final
@dataclass(frozen=True)
class Result:
    """What verify said of one run of one program.

    Attributes:
        name: of the program.
        kind: its truth: "S1" to "S40", or "clean".
        run: the words with which it was verified; "" of one that cannot be.
        exit_code: verify's: 0 equal, 1 differs, 2 refused before it ran, else not verified; None of one that cannot be.
        kinds: those of its findings, in their order.
        said: the first finding in words, or why it was not verified.
        seconds: that it took.
        twin: the clean program beside it.
        what: is wrong with it, or what it is.
        refused_for_it: whether a refusal has the words in which, by the program's own docstring, it names the mistake.
    """

    name: str
    kind: str
    run: str
    exit_code: int | None
    kinds: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0
    twin: str = ""
    what: str = ""
    refused_for_it: bool = False

    @property
    def outcome(self) -> str:
        """caught, refused, missed; clean, false alarm (refused, too); not verified, unseen.

        Whatever ends verify otherwise than in an answer (a lost peer, user code that raises: 1, without a finding) says
        nothing of the program: it is not verified. Neither does a refusal of a wrong program for anything else than its
        mistake, such as a name in it that is not there.
        """
        if self.exit_code is None:
            return UNSEEN
        refused = self.exit_code == EXIT_REFUSED and (self.kind == CLEAN or self.refused_for_it)
        accused = bool(self.kinds) if self.exit_code == EXIT_DIFFERS else refused
        if not accused and self.exit_code != EXIT_EQUAL:
            return UNVERIFIED
        if self.kind == CLEAN:
            return FALSE_ALARM if accused else SILENT
        return {EXIT_EQUAL: MISSED, EXIT_DIFFERS: CAUGHT, EXIT_REFUSED: REFUSED}[self.exit_code]

    @property
    def named_first(self) -> bool:
        """Whether the first finding is of the program's kind."""
        return self.outcome == CAUGHT and self.kinds[:1] == (self.kind,)

    @property
    def named(self) -> bool:
        """Whether some finding is of the program's kind."""
        return self.outcome == CAUGHT and self.kind in self.kinds

    @property
    def right(self) -> bool:
        """Whether nothing has to be mended: caught or refused, silent on a clean program, or known to be unseen."""
        return self.outcome in (CAUGHT, REFUSED, SILENT, UNSEEN)

    def to_json(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        return asdict(self) | {"outcome": self.outcome, "named_first": self.named_first, "named": self.named}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Result":
        """The Result of a document of `to_json`."""
        fields = {key: document[key] for key in Result.__dataclass_fields__}
        return Result(**fields | {"kinds": tuple(fields["kinds"])})


@final
@dataclass(frozen=True)
class Score:
    """Counts over programs; one that is verified in several ways counts once for each.

    Attributes:
        wrong: runs of wrong programs that one machine can show.
        caught: of them, those that are refused for their mistake before they run included.
        refused: of them, those.
        named_first, named: of them, by the first and by any finding.
        clean: runs of clean programs.
        false_alarms: of them.
        unverified: runs of which verify could say nothing, or that it has refused for something else.
        unseen: wrong programs that one machine cannot show.
        kinds: kinds with a program that can be shown.
        kinds_caught: kinds of which every such program is caught.
        seconds: of all runs.
    """

    wrong: int
    caught: int
    refused: int
    named_first: int
    named: int
    clean: int
    false_alarms: int
    unverified: int
    unseen: int
    kinds: int
    kinds_caught: int
    seconds: float

    @property
    def perfect(self) -> bool:
        """Whether every wrong program is caught and no clean one accused."""
        return self.caught == self.wrong and not self.false_alarms and not self.unverified

    def to_json(self) -> dict[str, Any]:
        """The counts."""
        return asdict(self)


def score(results: Iterable[Result]) -> Score:
    """The counts over some results."""
    every = list(results)
    shown = [result for result in every if result.outcome != UNSEEN]
    wrong = [result for result in shown if result.kind != CLEAN]
    missed = {result.kind for result in wrong if not result.right}
    return Score(
        wrong=len(wrong),
        caught=sum(result.right for result in wrong),
        refused=_count(wrong, REFUSED),
        named_first=sum(result.named_first for result in wrong),
        named=sum(result.named for result in wrong),
        clean=len(shown) - len(wrong),
        false_alarms=_count(shown, FALSE_ALARM),
        unverified=_count(shown, UNVERIFIED),
        unseen=len(every) - len(shown),
        kinds=len({result.kind for result in wrong}),
        kinds_caught=len({result.kind for result in wrong} - missed),
        seconds=round(sum(result.seconds for result in every), 1),
    )


def _count(results: Sequence[Result], outcome: str) -> int:
    return sum(result.outcome == outcome for result in results)


def by_kind(result: Result) -> tuple[int, str]:
    """A sort key: by number of kind, the clean ones behind them."""
    return (99 if result.kind == CLEAN else int(result.kind[1:]), result.name)
