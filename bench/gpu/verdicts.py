"""What the figures of a GPU machine are held to: rows of {"what", "ok", "loss", "said"}; ok is None where it was not.

Losses are held to a tenth of what training took off the loss in float32: who learns nothing is ten times as far off.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TOLERANCE = 0.1
"""Of the fall: what rounding in eight bits may move a loss within these steps."""

LEAST_FALL = 0.5
"""Nats. A run that falls by less is no measure for the others."""

TARGETS: Mapping[str, tuple[str, float]] = {
    "mfu": ("at least", 0.45),
    "speed_of_raw": ("at least", 0.98),
    "memory_of_raw": ("at most", 1.02),
}

Row = dict[str, Any]


def row(what: str, ok: bool | None, loss: float | None = None, said: str = "") -> Row:
    """One line of what is printed."""
    return {"what": what, "ok": ok, "loss": loss, "said": said}


def judge_mode(what: str, losses: Sequence[float], expected: Sequence[float]) -> Row:
    """Whether a mode has arrived where float32 has, whose losses are `expected`; its own are held to have fallen."""
    fall = expected[0] - expected[-1]
    away = abs(losses[-1] - expected[-1])
    if not fall >= LEAST_FALL:
        return row(what, False, losses[-1], f"the loss of float32 fell by {fall:.4f} only: nothing can be held to it")
    ok = away <= TOLERANCE * fall
    return row(what, ok, losses[-1], "" if ok else f"{away:.4f} from float32, which fell by {fall:.4f}")


def judge_losses(ours: Sequence[float], raw: Sequence[float]) -> Row:
    """Whether both loops have trained the same: every step's loss, not the last alone."""
    what, fall = "losses of ours and raw", raw[0] - raw[-1]
    if len(ours) != len(raw) or not fall >= LEAST_FALL:
        return row(what, False, None, f"{len(ours)} and {len(raw)} steps; the loss of raw fell by {fall:.4f}")
    away = [abs(one - other) for one, other in zip(ours, raw, strict=True)]
    ok = all(distance <= TOLERANCE * fall for distance in away)  # false for one that is no number, which max() may miss
    return row(what, ok, ours[-1], f"at most {max(away):.4f} apart, and raw fell by {fall:.4f}")


def judge_speed(speed: Mapping[str, Any]) -> Iterator[Row]:
    """What `compare_speed` found, beside the targets, which are of the 1b model on a GPU."""
    held = speed["device"] != "cpu" and speed["size"] == "1b"
    for name, (bound, target) in TARGETS.items():
        what, value = f"{name} {bound} {target}", speed[name]
        if not held or value is None:
            why = "the device's peak is not known" if held else "held on a GPU and the 1b model alone"
            yield row(what, None, None, why)
        else:
            yield row(what, value >= target if bound == "at least" else value <= target, None, f"{value:.3f}")
    yield judge_losses(speed["losses"]["ours"], speed["losses"]["raw"])
