"""What a plan said before the run, beside what the run measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, final

from allranks.config import Config
from allranks.errors import AllranksError
from allranks.ordinary_file import read_small
from allranks.reporting.history import Attempt
from allranks.run import Run

NOTHING = (0.0, 0.0, 0.0)


@final
@dataclass(frozen=True, slots=True)
class Figure:
    """One predicted figure with its 90% interval, beside the measured one.

    Attributes:
        measured: None where the run has measured none yet, or is another than the planned one.
        ratio: measured over expected.
    """

    low: float
    expected: float
    high: float
    measured: float | None
    ratio: float | None


@final
@dataclass(frozen=True, slots=True)
class Prediction:
    """A Run's plan.json as the report sees it.

    Attributes:
        cluster: what was planned for; layout: what was planned; because: why that one.
        step_seconds, peak_bytes: of the fullest rank; None where the plan predicts none.
        differs: what of the run is not as planned, so that nothing is compared; "" where all is.
    """

    cluster: str
    layout: str
    because: str
    step_seconds: Figure | None
    peak_bytes: Figure | None
    differs: str


def compare(
    run: Run, newest: Attempt | None, step_seconds: float | None, peak_bytes: float | None
) -> Prediction | None:
    """The plan in the Run directory beside the measured median step and the fullest rank's peak.

    None without a plan.json, or where it cannot be read as one: a report has to be made of what is there.
    """
    try:
        document = json.loads(read_small(run.plan_path).decode())
        config = run.config()
    except (OSError, ValueError, RecursionError, AllranksError):
        return None
    best = document.get("best") if isinstance(document, dict) else None
    if not isinstance(best, dict) or not isinstance(best.get("layout"), str):
        return None
    differs = _differs(document, best, config, newest)
    return Prediction(
        cluster=str(document.get("cluster", "")),
        layout=best["layout"],
        because=str(best.get("because", "")),
        step_seconds=_figure(best.get("step_seconds"), None if differs else step_seconds, (_saving_seconds(best),) * 3),
        peak_bytes=_figure(best.get("peak_bytes"), None if differs else peak_bytes, _unseen_bytes(best, newest)),
        differs=differs,
    )


def _saving_seconds(best: Mapping[str, Any]) -> float:
    """What checkpoints take of the predicted step: the median step of a run has none in it."""
    causes = best.get("seconds_by_cause")
    share = causes.get("checkpoint") if isinstance(causes, dict) else None
    return float(share) if isinstance(share, int | float) else 0.0


def _unseen_bytes(best: Mapping[str, Any], newest: Attempt | None) -> tuple[float, float, float]:
    """What a prediction's low, expected and high hold and a run does not measure: on CUDA it measures torch's tensors.

    The driver's context and the allocator's spare are outside of that; low counts what is in use, without a spare.
    """
    parts, span = best.get("bytes_by_category"), best.get("peak_bytes")
    on_cuda = newest is not None and newest.device.startswith("cuda")
    if not on_cuda or not isinstance(parts, dict) or not isinstance(span, dict):
        return NOTHING
    try:
        used, framework = sum(float(size) for size in parts.values()), float(parts.get("framework", 0.0))
        unseen = max(0.0, float(span["expected"]) - (used - framework))
        return framework, unseen, unseen
    except (KeyError, TypeError, ValueError):
        return NOTHING


def _figure(span: object, measured: float | None, unseen: tuple[float, float, float] = NOTHING) -> Figure | None:
    if not isinstance(span, dict):
        return None
    values = [span.get(name) for name in ("low", "expected", "high")]
    pairs = zip(values, unseen, strict=True)
    numbers = [float(value) - part for value, part in pairs if isinstance(value, int | float)]
    if len(numbers) < 3 or not all(isfinite(number) for number in numbers) or numbers[1] <= 0:
        return None
    low, expected, high = max(0.0, numbers[0]), numbers[1], numbers[2]
    return Figure(low, expected, high, measured, None if measured is None else measured / expected)


def _differs(document: Mapping[str, Any], best: Mapping[str, Any], config: Config, newest: Attempt | None) -> str:
    """`name planned -> of the run` for everything that makes it another run."""
    train = config.train
    pairs: list[tuple[str, object, object]] = [
        ("global_batch", best.get("global_batch"), train.global_batch),
        ("precision", best.get("precision"), train.precision),
    ]
    if train.micro_batch is not None:
        pairs.append(("micro_batch", best.get("micro_batch"), train.micro_batch))
    else:
        pairs.append(("micro_steps", best.get("micro_steps"), train.micro_steps or 1))
    if newest is not None:
        pairs = [
            ("devices", document.get("devices"), newest.world_size), ("layout", best["layout"], newest.layout), *pairs
        ]  # fmt: skip
    return ", ".join(f"{name} {planned} -> {real}" for name, planned, real in pairs if planned not in (None, real))
