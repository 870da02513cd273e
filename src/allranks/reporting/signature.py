"""One kind of failure: the line that tells of it, what usually caused it, and what to do."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, final

Known = Literal["threads", "reproduced", "general"]
"""How well: several reports agree on cause and remedy; a test of ours fails in that way under stock torchrun, and finds
the line in its log (tests/reporting/failing_program.py); or the wording or the remedy is general knowledge, and the
answer says so.
"""


@final
@dataclass(frozen=True)
class Signature:
    """One kind of failure.

    Attributes:
        name: E1 ... E33, P1; stays the same over versions.
        pattern: a regular expression for one line.
        what: the failure, in words; `{1}` is the pattern's first group.
        next: what to look at, and what to change.
        known: see Known.
        consequence: whether another failure usually came before it, on this rank or on another.
        beside: it says something only beside one of these.
        flags: of the regular expression.
        last: it says something only where nothing comes behind it but more of NCCL's own words.
    """

    name: str
    pattern: str
    what: str
    next: str
    known: Known = "threads"
    consequence: bool = False
    beside: tuple[str, ...] = ()
    flags: int = field(default=0, repr=False)
    last: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The pattern, compiled."""
        return re.compile(self.pattern, self.flags)
