"""Numbers as people write them: 15T tokens, 32k positions, 30d."""

import math
import re
from collections.abc import Mapping

from allranks.errors import ConfigError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", re.IGNORECASE)
POSITIONS = {"": 1, "k": 1024, "m": 1024**2}
MOST = 1e18
"""Of anything that is planned: above it a figure is a slip, and means nothing."""
MOST_SAMPLES = 1e12
"""In one step."""
TIMES = {"s": 1, "ms": 1e-3, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def read_number(text: str, suffixes: Mapping[str, float], option: str) -> float:
    """`15T`, `32k`, `30d`. Raises ConfigError with the forms that there are."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in suffixes or float(match[1]) <= 0:
        forms = ", ".join(f"30{suffix}" for suffix in suffixes)
        raise ConfigError(f"{option} {text}: not understood; write {forms}")
    found = float(match[1]) * float(suffixes[match[2].lower()])
    if found > MOST:
        raise ConfigError(f"{option} {text}: more than {MOST:g}, which no run has")
    return found


def check_amount(given: float | None, option: str, most: float = MOST) -> None:
    """ConfigError where a figure of the command line is not positive and finite, or more than there can be."""
    if given is None:
        return
    if not (math.isfinite(given) and given > 0):
        raise ConfigError(f"{option} {given:g}: write a number above 0")
    if given > most:
        raise ConfigError(f"{option} {given:g}: more than {most:g}, which no run has")
