"""What rich draws, as plain text of a given width."""

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType


def as_text(parts: Sequence[RenderableType], width: int) -> str:
    """The parts below each other, without colours, and without spaces at the ends of lines."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, color_system=None, force_terminal=False).print(Group(*parts))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
