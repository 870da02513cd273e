"""Numbers for people: bytes, seconds and counts as short text."""

from datetime import datetime

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_THOUSAND = 1000
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_LONG_SPANS = (
    (_MINUTE, "min", 1, "s", 60),
    (_HOUR, "h", _MINUTE, "min", 24),
    (_DAY, "d", _HOUR, "h", float("inf")),
)


def format_bytes(num_bytes: float) -> str:
    """`1.2 GB`: powers of 1000, as disks and networks are sold; whole bytes below 1000."""
    scaled, prefix = _scale(num_bytes)
    return f"{scaled} {prefix}B"


def format_count(number: float) -> str:
    """`12.3k`, `7.0B`: one digit behind the point above 1000; B for a thousand million."""
    scaled, prefix = _scale(number)
    return scaled + ("B" if prefix == "G" else prefix)


def format_moment(unix_seconds: float) -> str:
    """`2026-11-27 03:22:42` in this machine's time; of what is no moment `an unknown time`."""
    try:
        return datetime.fromtimestamp(unix_seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def format_seconds(seconds: float) -> str:
    """`85 us`, `12.3 ms`, `4.2 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`: two units at most."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    for scale, unit, digits in ((1e-6, "us", 0), (1e-3, "ms", 1), (1, "s", 1)):
        text = f"{seconds / scale:.{digits}f}"
        # A rounding that reaches the next unit takes it: 999.96 ms is 1.0 s.
        if float(text) < (_MINUTE if unit == "s" else _THOUSAND):
            return f"{text} {unit}"
    for large, large_unit, small, small_unit, limit in _LONG_SPANS:
        whole, rest = divmod(round(seconds / small), large // small)
        if whole < limit:
            return f"{whole} {large_unit} {rest:02d} {small_unit}"
    raise AssertionError("a span of days is always accepted")


def _scale(number: float) -> tuple[str, str]:
    """The number below 1000 as text, and its prefix; a rounding that reaches 1000 takes the next prefix."""
    size = abs(number)
    sign = "-" if number < 0 else ""
    for place, prefix in enumerate(_PREFIXES):
        text = f"{size / _THOUSAND**place:.{min(place, 1)}f}"
        if float(text) < _THOUSAND or prefix == _PREFIXES[-1]:
            return sign + text, prefix
    raise AssertionError("the last prefix is always accepted")
