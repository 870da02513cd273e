"""A signature is a line's pattern and what is said of it."""

import re

from allranks.reporting.signature import Signature


def test_the_pattern_is_compiled_once_and_with_its_flags() -> None:
    plain = Signature("X1", r"loss (nan)", "{1}", "look")
    loud = Signature("X2", r"loss (nan)", "{1}", "look", flags=re.IGNORECASE)
    assert plain.regex.search("Loss NaN") is None and loud.regex.search("Loss NaN") is not None
    assert plain.regex is plain.regex and plain.known == "threads" and not (plain.consequence or plain.last)
