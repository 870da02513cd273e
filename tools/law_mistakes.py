"""The table of mistakes in allranks itself that verify finds, law by law: from the list that the tests run."""

from collections.abc import Iterator, Sequence

from allranks.verifying.findings import KINDS
from tests.verifying.mistakes import LAWS, LOAD, OURS, START, UNSEEN, Mistake

BEGIN, END = "<!-- begin of the laws -->\n", "<!-- end of the laws -->\n"
REFUSED = {
    START: "refused: the run's own comparison with one process, before its first step",
    LOAD: "could not be verified: the load compares digests of tensors, and fails",
}


def render_laws(mistakes: Sequence[Mistake] = OURS) -> str:
    """One row a mistake, and the laws below of which no run shows anything."""
    lines = ["| law | mistake | verified with | found |", "|---|---|---|---|", *map(_row, mistakes), ""]
    return "\n".join([*lines, *_unseen()]) + "\n"


def _row(mistake: Mistake) -> str:
    words = " ".join((f"--layout {mistake.layout}", *mistake.words))
    found = REFUSED.get(mistake.kind) or f"{mistake.kind}: {KINDS[mistake.kind].name}"
    return f"| {mistake.law}: {LAWS[mistake.law]} | {mistake.what} | `{words}` | {found} |"


def _unseen() -> Iterator[str]:
    for law, why in UNSEEN.items():
        yield f"- Law {law}, {LAWS[law]}, is not seen: {why}."
