"""What rich draws, as plain text of a given width."""

import io
import re
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

_MAY_BREAK = "\x1f"
"""White space for rich, which breaks lines there and gives it no width; it is gone before anybody reads it."""


def breakable(text: str) -> Text:
    """Text whose lines may also end behind the commas of a layout, and inside a word only where it fills a line."""
    return Text(re.sub(r",(?=[a-z])", f",{_MAY_BREAK}", text), overflow="fold")


def as_text(parts: Sequence[RenderableType], width: int) -> str:
    """The parts below each other, without colours, and without spaces at the ends of lines."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, color_system=None, force_terminal=False).print(Group(*parts))
    return "\n".join(line.rstrip() for line in file.getvalue().replace(_MAY_BREAK, "").splitlines())
