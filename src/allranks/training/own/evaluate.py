"""Exact evaluation in an own loop: every sample once, whatever the number of ranks."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from allranks.data.evaluation import evaluation_batches
from allranks.data.micro_step import MicroStep
from allranks.data.random_keys import generators_kept, seed_all
from allranks.data.stream import draws
from allranks.errors import TaskError
from allranks.layout import Layout
from allranks.stepping.evaluate import world_means
from allranks.training.own.driven import Driven, Metrics
from allranks.training.own.ground import Ground
from allranks.training.own.models import needs_run
from allranks.training.own.step import OwnStep

Measure = Callable[[Any], Mapping[str, tuple[Any, Any]]]


def choose_measure(measure: Measure | None, metrics: Metrics | None, driven: Driven, layout: Layout) -> Measure:
    """What is measured of a batch: `measure` of it as it is, or `metrics` of the output that the world makes of it.

    Raises:
        TaskError: neither is given, both are, or the one that this layout cannot do.
    """
    if (measure is None) == (metrics is None):
        raise TaskError("world.evaluate: give either measure(batch) or metrics=, a function of (output, batch)")
    if metrics is not None:
        return partial(driven.measure, metrics)
    assert measure is not None
    if needs_run(layout):
        raise TaskError(
            f"world.evaluate(dataset, measure): layout {layout} spreads a forward over several processes: give "
            "metrics=, a function of (output, batch) that returns {name: (sum, count)}"
        )
    return measure


def evaluate_own(ground: Ground, step: OwnStep, dataset: Any, measure: Measure, **loading: Any) -> dict[str, float]:
    """`measure` over all of `dataset`, in evaluation mode; `loading` goes to `evaluation_batches`; collective.

    Raises:
        TaskError: `measure` gives anything but {name: (sum, count)}. DataError, ConfigError: the dataset or the batch.
    """
    step.links.check_one("world.evaluate()")
    mesh = ground.processes.mesh
    # Under a pipeline the first rank has to hear of what the last stage tells.
    group = mesh.sample_group if mesh.layout.pp == 1 else ground.processes.world_group
    ground.stopwatch.mark("other")
    batches = evaluation_batches(
        dataset,
        num_ranks=mesh.dp,
        dp_rank=mesh.dp_rank,
        seed=ground.config.train.seed,
        draws=draws(dataset),
        pin=ground.device.type == "cuda",
        **loading,
    )

    def place_and_measure(micro_step: MicroStep) -> object:
        step.weight = micro_step.weight  # for gather
        with ground.models.counting(micro_step.weight > 0):
            return measure(ground.place(micro_step.batch))

    before = step.weight
    step.driven.calls.watch()
    try:
        # In the middle of a step, before its forward, say: that has to draw what it draws without.
        with ground.models.evaluating(), generators_kept():
            tells = mesh.layout.pp == 1 or mesh.adds_loss
            found = measure_all(batches, place_and_measure, ground.device, group, tells=tells)
    finally:
        step.weight = before
    ground.stopwatch.mark("evaluation")
    return found


@torch.no_grad()
def measure_all(
    batches: Iterable[MicroStep],
    measure: Callable[[MicroStep], object],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    tells: bool = True,
) -> dict[str, float]:
    """The world's sums of what `measure` gives, each divided by the world's count, as `world_means`; collective.

    Args:
        batches: this rank's share; each rank has equally many, some of them fillers of weight 0, which count nothing.
        measure: {name: (sum, count)} of a micro-step; names may differ by rank and micro-step.
        device: where the group's backend wants its tensors.
        group: the ranks that share the dataset; None for one.
        tells: whether this rank's sums count; not where another rank of the group has the same ones.

    Raises:
        TaskError: `measure` gives anything else.
    """
    sums: dict[str, list[float]] = {}
    for micro_step in batches:
        seed_all(micro_step.random_key)
        for name, (total, count) in _checked(measure(micro_step)).items():
            if micro_step.weight:  # a filler adds nothing, not even 0 * nan
                held = sums.setdefault(name, [0.0, 0.0])
                held[0] += total
                held[1] += count
    return world_means(sums if tells else {}, group, device)


def _checked(found: object) -> dict[str, tuple[float, float]]:
    if not isinstance(found, Mapping):
        raise TaskError(f"world.evaluate: measure returned a {type(found).__name__}: return {{name: (sum, count)}}")
    return {str(name): _pair(name, value) for name, value in found.items()}


def _pair(name: object, value: object) -> tuple[float, float]:
    if isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value)):
        return float(value[0]), float(value[1])
    raise TaskError(f"world.evaluate: measure has {value!r:.60} for {name}: return {{name: (sum, count)}}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
