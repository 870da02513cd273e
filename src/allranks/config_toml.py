"""TOML as text: read with one clear line on error, written so that reading it back gives the same values."""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allranks.errors import ConfigError
from allranks.ordinary_file import read_small


def read_toml(path: Path, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The values of a TOML file, its floats as `parse_float` makes them.

    Raises ConfigError with the wrong line, or the reason why it cannot be read.
    """
    try:
        return tomllib.loads(read_small(path).decode(), parse_float=parse_float)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).rstrip(")").partition(" (at ")
        where = re.match(r"line (\d+), column (\d+)", place)
        line = f" line {where[1]}" if where else ""
        raise ConfigError(
            f"{path}{line}: not valid TOML: {reason[:1].lower()}{reason[1:]}{_advise(path, where)}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid TOML: it is not UTF-8 text") from None
    except (ArithmeticError, RecursionError, ValueError) as error:  # a number or a nesting that nothing can hold
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def find_line(path: Path, leaf: str) -> str:
    """` line 4` where exactly one line of the file gives `leaf`, else ""."""
    pattern = re.compile(rf"\s*(?:[\w.\"-]+\.)?\"?{re.escape(leaf)}\"?\s*=")
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if pattern.match(line)]
    return f" line {found[0]}" if len(found) == 1 else ""


def render_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Tables of values as TOML text; a None, which TOML cannot say, is left out, and so is a table without values."""
    import tomli_w

    given = {table: _without_none(values) for table, values in tables.items()}
    try:
        return tomli_w.dumps({table: values for table, values in given.items() if values})
    except TypeError as error:
        raise ConfigError(f"a setting cannot be written to TOML: {error}; use text, numbers, lists or tables") from None


def _advise(path: Path, where: re.Match[str] | None) -> str:
    """The line itself, because most mistakes are seen at once when it is shown."""
    if where is None:
        return ""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = int(where[1])
    return f": {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""


def _without_none(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(name): _without_none(inner) for name, inner in value.items() if inner is not None}
        case list() | tuple():
            return [_without_none(inner) for inner in value if inner is not None]
    return value
