"""Values as strict JSON has them."""

from collections.abc import Mapping
from math import isfinite


def as_json(value: object) -> object:
    """Tables and lists all through; what JSON has no word for (nan, a date, a path) as its text."""
    match value:
        case Mapping():
            return {str(key): as_json(entry) for key, entry in value.items()}
        case list() | tuple():
            return [as_json(entry) for entry in value]
        case float():
            return value if isfinite(value) else str(value)
        case str() | int() | None:
            return value
    return str(value)
