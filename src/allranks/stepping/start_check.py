"""What is found out on a few samples before the first step.

What forward gets, how targets are counted, what the loss is, and whether it leaves parameters without a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from allranks.data.random_keys import item_key, seed_all
from allranks.data.stream import declared_order
from allranks.errors import AllranksError, TaskError
from allranks.parallel.parallelize import Spread
from allranks.stepping.loss_check import NUM_SAMPLES, examine_loss
from allranks.stepping.passes import Forward, buffers_kept
from allranks.task import Task, has_step, resolve_inputs, resolve_targets
from allranks.task_loading import user_line
from allranks.verdict import Decision


@dataclass(frozen=True)
class Meeting:
    """What is known once the Task has met its data.

    Attributes:
        coupled: whether the loss couples the samples of a forward.
        forward: the user's forward and loss.
        count_targets: batch -> number of targets; None where `step` counts them itself.
    """

    coupled: bool
    forward: Forward
    count_targets: Callable[[Any], int] | None
    decisions: tuple[Decision, ...]


def check_at_start(task: Task, spread: Spread, dataset: Any, seed: int) -> Meeting:
    """Find out, on the first samples of the dataset; collective under a sharded layout.

    Raises:
        TaskError: the Task breaks its contract on them; the user's own line is shown.
    """
    if has_step(task):
        return Meeting(task.coupled, Forward(task, spread, lambda batch: (batch,)), None, ())
    if "" not in spread.modules:
        names = ", ".join(spread.modules)
        what = f"model() returned several modules ({names})"
        raise TaskError(f"{what}: {type(task).__name__} needs a step(models, batch)")
    try:
        return _meet(task, spread, first_samples(dataset, seed))
    except AllranksError:
        raise
    except Exception as error:
        failed = f"{type(task).__name__} fails on the first samples of its dataset"
        raise TaskError(f"{failed}:\n{user_line(error)}") from error


def _meet(task: Task, spread: Spread, samples: list[Any]) -> Meeting:
    batch, module = task.collate(list(samples)), spread.bare()
    inputs, targets = resolve_inputs(task, module, batch), resolve_targets(task, batch)
    forward = Forward(task, spread, inputs.call)
    nature = examine_loss(
        task,
        module,
        samples,
        inputs=inputs.call,
        targets=targets.call,
        place=forward.place,
        autocast=forward.autocast,
        compute=spread.precision.compute,
    )
    # A forward whose backward never came leaves gathered parameters behind.
    spread.reshard()
    coupled = nature.kind == "coupled"
    decisions = (
        Decision(f"forward gets {inputs.because}", "a Task may override inputs()"),
        Decision(f"targets are {targets.because}", "a Task may override targets()"),
        Decision("the loss couples samples" if coupled else "the loss is a sum", nature.because),
    )
    return Meeting(coupled, forward, targets.call, decisions + _meet_unused(forward, batch))


def _meet_unused(forward: Forward, batch: Any) -> tuple[Decision, ...]:
    """Have DDP look for parameters without gradient, where the loss leaves some: else they would hold up the others.

    Every rank takes the same samples, so all decide alike. FSDP minds none, and a static graph finds them by itself.
    """
    spread = forward.spread
    if not spread.mesh.layout.replicated or spread.mesh.layout.static_graph:
        return ()
    spread.synchronise(last=False)
    with buffers_kept(spread, unless=False):
        placed = forward.place(batch)
        loss = forward.task.loss(forward(placed), placed)
    loss.backward()
    unused = [name for name, parameter in spread.trainable().items() if parameter.grad is None]
    for parameter in spread.trainable().values():
        parameter.grad = None
    if not unused:
        return ()
    spread.expect_unused()
    others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    because = f"{unused[0]}{others} got none on the first samples"
    return (Decision("every backward is searched for parameters without gradient", because),)


def first_samples(dataset: Any, seed: int) -> list[Any]:
    """The dataset's first few samples, each loaded under its own key as in training; an iterable is begun anew."""
    if declared_order(dataset) != "map":
        seed_all(item_key(seed, 0, 0))
        return list(islice(iter(dataset), NUM_SAMPLES))
    samples = []
    for index in range(min(NUM_SAMPLES, len(dataset))):
        seed_all(item_key(seed, 0, index))
        samples.append(dataset[index])
    return samples
