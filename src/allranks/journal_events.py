"""The events of a Run's journal as they are read: lines that a crash tore are left out, redone steps stand once."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from allranks.errors import RunError
from allranks.ordinary_file import read_ordinary

TAIL_BYTES = 1 << 16


def read_events(path: Path) -> list[dict[str, Any]]:
    """All of one journal, in order; none where there is no such file. Raises RunError where it cannot be read."""
    return list(_parse_lines(_read(path)))


def latest_steps(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step events of one journal, ascending; what a resume went back behind is left out, also if never redone."""
    steps: list[dict[str, Any]] = []
    for event in events:
        resumed = event["event"] == "resume" and isinstance(event.get("step"), int)
        if not resumed and not _is_step(event):
            continue
        while steps and steps[-1]["step"] > event["step"] - (not resumed):
            steps.pop()
        if not resumed:
            steps.append(event)
    return steps


def last_step(path: Path) -> int:
    """The number of the step that a journal has last, 0 before the first; reads only the tail."""
    tail = _parse_lines(_read(path, TAIL_BYTES))
    return next((event["step"] for event in reversed(list(tail)) if _is_step(event)), 0)


def _read(path: Path, last_bytes: int | None = None) -> bytes:
    try:
        return read_ordinary(path, last_bytes)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; restore it or move it away") from None


def _is_step(event: Mapping[str, Any]) -> bool:
    return event["event"] == "step" and isinstance(event.get("step"), int)


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)


def _parse_lines(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            event = _STRICT.decode(line.decode())
        except (ValueError, RecursionError):  # a damaged line may be brackets alone
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            yield event
