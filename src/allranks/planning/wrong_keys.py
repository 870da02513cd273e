"""What pydantic says of a table of a cluster file, as one line that names the key, the value and the next move."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar, final

from pydantic import BaseModel, ValidationError

from allranks.errors import ConfigError
from allranks.planning.catalog import nearest

Model = TypeVar("Model", bound=BaseModel)
NEEDED = 'nodes = 8, devices_per_node = 8 and device = "a100-80g" are enough'
COUNTS = ("nodes", "devices_per_node")  # without one of them there is nothing to plan for
LIKE = 'or say like = "a100-80g" to take from the catalog what is not given'


_HEADER = re.compile(r"\s*\[([\w.-]+)\]")
_GIVEN = re.compile(r"\s*([\w.-]+)\s*=")


@final
class WrongKey(ConfigError):
    """A ConfigError that knows its key ("device.peak_tflops.bfloat16"), so that the line can be named."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key

    def line(self, path: Path) -> str:
        """` line 4`: where the file gives the key, or else the table that it is in; "" where neither is found."""
        table, best, found = "", "", ""
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if header := _HEADER.match(text):
                table, here = header[1], header[1]
            elif given := _GIVEN.match(text):
                here = ".".join(filter(None, [table, given[1]]))
            else:
                continue
            if f"{self.key}.".startswith(f"{here}.") and len(here) > len(best):
                best, found = here, f" line {number}"
        return found


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Inside, a ConfigError or ValueError is about `key`."""
    try:
        yield
    except WrongKey:
        raise
    except (ConfigError, ValueError) as error:
        raise _under(key, str(error)) from None


def validate(
    model: type[Model], values: Mapping[str, Any], where: str, *, known: Iterable[str] = (), missing: str = ""
) -> Model:
    """A table of the file as `model`.

    Args:
        where: the table's name, "" for the keys above all tables.
        known: the keys to choose the nearest from; by default the model's own.
        missing: what to do where a key of the table is missing.

    Raises:
        WrongKey: of an unknown key before all else, since it is often the one that is missing.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"] if part != "[key]"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not path:
        raise _under(where, message)
    key = ".".join(filter(None, [where, *path]))
    raise WrongKey(key, _explain(first, key, message, tuple(known) or tuple(model.model_fields), missing))


def _under(where: str, message: str) -> WrongKey:
    """A message about `where`, or about a key of it that the message begins with: `memory_gb = 80 is ...`."""
    told = re.match(r"([a-z]\w+(?:\.\w+)*)(?: = |: )", message)
    if told is None:
        return WrongKey(where, f"{where}: {message}" if where else message)
    return WrongKey(*(f"{where}.{told[1]}", f"{where}.{message}") if where else (told[1], message))


def _explain(first: Any, key: str, message: str, known: tuple[str, ...], missing: str) -> str:
    """One error of pydantic's: what is expected, and what is the nearest to what was given."""
    leaf = key.rpartition(".")[2]
    match first["type"]:
        case "extra_forbidden":
            return f"unknown key '{key}'{nearest_word(leaf, known)}"
        case "missing" if leaf.isdigit():
            return f"{key.rpartition('.')[0]} = {as_toml(first['input'])}: too short a row"
        case "missing":
            return f"{key} is missing" + (f"; {missing}" if missing else "")
        case "literal_error":
            choices = re.findall("'([^']+)'", message)
            return f"unknown key '{key}'{nearest_word(leaf, choices)}"
        case "greater_than_equal":
            none = "no devices; " if leaf in COUNTS else ""
            message = f"{none}give a whole number of at least {first['ctx']['ge']}"
        case "greater_than":
            message = f"a number above {first['ctx']['gt']} is expected"
        case "int_type" | "int_from_float" | "int_parsing":
            message = "a whole number is expected"
    return f"{key} = {as_toml(first['input'])}: {message[:1].lower()}{message[1:]}"


def nearest_word(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'memory_gb'?` of keys, which have underscores, or all of them where none is near."""
    hyphened = [name.replace("_", "-") for name in known]
    return nearest(word, hyphened, sorted(hyphened)).replace("-", "_")


def as_toml(value: object) -> str:
    """A value about as the file has it."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case Decimal():
            return str(value).lower() if len(str(value)) < 12 else f"{float(value):.12g}"
        case list():
            return f"[{', '.join(map(as_toml, value))}]"
        case Mapping():
            return "{ ... }"
    return str(value)
