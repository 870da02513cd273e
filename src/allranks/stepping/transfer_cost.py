"""What a step moves between the devices of one process: measured on the first samples, told for a whole step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from allranks.data.cut import Cut
from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import generators_kept
from allranks.parallel.transfers import Transfer
from allranks.stepping.passes import Forward, buffers_kept
from allranks.units import format_bytes
from allranks.verdict import Decision

MOST = 3
"""Samples that are enough to tell what each adds; their backward needs the memory of so many."""

Way = tuple[str, str]


@final
@dataclass(frozen=True, slots=True)
class TransferCost:
    """The transfers of one micro-step.

    Attributes:
        num_forward, num_backward: transfers in each.
        per_sample: (from, to) -> bytes that each sample adds.
        fixed: (from, to) -> bytes that do not depend on the number of samples (tables, shared parameters).
    """

    num_forward: int
    num_backward: int
    per_sample: dict[Way, float]
    fixed: dict[Way, float]


def measure_transfers(forward: Forward, samples: Sequence[Any]) -> TransferCost | None:
    """Of a forward and a backward in training mode; None where the process has one device. Leaves no trace."""
    if forward.spread.placement is None:
        return None
    samples = samples[:MOST]
    few = samples[: (len(samples) + 1) // 2]
    many, fewer = _transfers(forward, samples), _transfers(forward, few)
    ways = dict.fromkeys((one.source, one.target) for one in many)
    per_sample, fixed = {}, {}
    for way in ways:
        all_bytes, some_bytes = (
            sum(t.num_bytes for t in found if (t.source, t.target) == way) for found in (many, fewer)
        )
        more = len(samples) - len(few)
        per_sample[way] = (all_bytes - some_bytes) / more if more else all_bytes / len(samples)
        fixed[way] = all_bytes - per_sample[way] * len(samples)
    num_backward = sum(one.backward for one in many)
    return TransferCost(len(many) - num_backward, num_backward, per_sample, fixed)


def describe_transfers(cost: TransferCost | None, cut: Cut) -> tuple[Decision, ...]:
    """What a full step of one process moves, way by way."""
    if cost is None:
        return ()
    number, samples = cut.num_micro_steps(), cut.global_batch / cut.num_ranks
    ways = {way: size * samples + cost.fixed[way] * number for way, size in cost.per_sample.items()}
    total = (cost.num_forward + cost.num_backward) * number
    each = "; ".join(f"{source} to {target} {format_bytes(size)}" for (source, target), size in ways.items())
    what = f"a step moves {total} tensors between devices, {format_bytes(sum(ways.values()))}" + (
        f" ({each})" if each else ""
    )
    count = f"{number} micro-step{'s' * (number > 1)}"
    because = (
        f"{cost.num_forward} go forward and {cost.num_backward} back in each of {count}: measured on the first samples"
    )
    return (Decision(what, because),)


def _transfers(forward: Forward, samples: Sequence[Any]) -> list[Transfer]:
    spread = forward.spread
    assert spread.placement is not None
    # Without DDP around it: its ranks need not agree on this.
    module = spread.bare()
    with generators_kept(module), buffers_kept(spread, unless=False), spread.placement.recorded() as found:
        batch = forward.place(plain_batch(forward.task.collate(list(samples))))
        loss = forward.task.loss(spread.precision.cast_output(forward.raw(batch, module)), batch)
        loss.backward()
    for parameter in spread.trainable().values():
        parameter.grad = None
    return list(found)
