"""Why: one line for each configuration in a plan, with the numbers that decide."""

import math
from dataclasses import fields

from allranks.plan import Estimate, MemoryUse, Refusal, StepTime
from allranks.planning.host_traffic import HOST_SHARE
from allranks.units import format_bytes, format_seconds

CAUSES = {
    "compute": "computation",
    "recompute": "repeated forwards",
    "tensor": "the collectives of tp",
    "context": "the exchange of cp",
    "expert": "the exchange of ep",
    "data": "gradients and gathered parameters",
    "pipeline": "messages between stages",
    "bubble": "the pipeline's bubble",
    "optimizer": "the optimizer",
    "input": "the input",
    "checkpoint": "checkpoints",
    "offload": "moves to the host",
}
HOLDINGS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "the optimizer's state",
    "activations": "activations",
    "logits": "logits",
    "gathered": "gathered blocks",
    "communication": "buffers of messages",
    "framework": "the framework",
}
NOTICED = 0.01
"""A share of the step time below which two configurations count as equally fast."""
NOT_SEEN = 0.005
"""A share that a whole percentage rounds to none."""


def seconds_by_cause(time: StepTime) -> dict[str, float]:
    """Seconds by the field's name, the largest first; what takes none is left out."""
    return _by_field(time)


def bytes_by_category(memory: MemoryUse) -> dict[str, float]:
    """Bytes by the field's name, the largest first; what takes none is left out."""
    return _by_field(memory)


def _by_field(parts: StepTime | MemoryUse) -> dict[str, float]:
    found = {part.name: float(getattr(parts, part.name)) for part in fields(parts)}
    return dict(sorted(((name, much) for name, much in found.items() if much > 0), key=lambda pair: -pair[1]))


def why_first(best: Estimate, num_fitting: int) -> str:
    """Why the best is: the fastest of how many that fit, what its step is spent on, what is left of the memory."""
    of_how_many = f"the fastest of {num_fitting} that fit" if num_fitting > 1 else "the only one that fits"
    (cause, most), *others = list(seconds_by_cause(best.time).items()) or [("compute", 0.0)]
    spent = f"{CAUSES[cause]} {_share(most, best.time.total)} of the step"
    if others and others[0][1] > NOTICED * best.time.total:
        spent += f", {CAUSES[others[0][0]]} {_share(others[0][1], best.time.total)}"
    used = f"{format_bytes(best.memory.total)} in use of {format_bytes(best.capacity_bytes)}"
    full = best.peak_bytes.expected > (1 - NOTICED) * best.capacity_bytes
    return f"{of_how_many}: {spent}; {used}{f', the peak within {NOTICED:.0%} of it' if full else ''}"


def why_not(other: Estimate, best: Estimate | None) -> str:
    """Why this one is not the best: it does not fit, or it is slower, and because of what; what it has for that."""
    if not other.fits:
        return why_unfit(other)
    if best is None or other.choice == best.choice:
        return "fits"
    slower = other.step_seconds.expected / best.step_seconds.expected - 1
    saved = best.memory.total - other.memory.total
    memory = f"{format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} memory"
    if abs(slower) < NOTICED:
        return f"as fast within {NOTICED:.0%}, {memory}"
    if slower < 0:
        return f"{-slower:.0%} faster, {memory}"
    return f"{slower:.0%} slower: {_what_grows(other.time, best.time)}; {memory}"


def why_unfit(other: Estimate) -> str:
    """What it needs beside what a device has, and what needs the most; or what else it would fail by."""
    if other.fault:
        return f"would fail: {other.fault}"
    peak, capacity = other.peak_bytes, other.capacity_bytes
    if peak.low <= capacity and not other.fits_host:
        return f"does not fit: {needs_of_host(other)}"
    name, most = next(iter(bytes_by_category(other.memory).items()))
    if other.may_fit:
        return (
            f"is not sure to fit: {format_bytes(peak.low)} to {format_bytes(peak.high)} of {format_bytes(capacity)};"
            f" {HOLDINGS[name]} {format_bytes(most)}"
        )
    times = f" ({peak.expected / capacity:.1f} times)" if peak.expected > 1.5 * capacity else ""
    return (
        f"does not fit: {format_bytes(peak.expected)} of {format_bytes(capacity)}{times};"
        f" {HOLDINGS[name]} {format_bytes(most)}"
    )


def needs_of_host(other: Estimate) -> str:
    """What the processes of a node keep in its memory, and what it has for that, which somebody knows."""
    assert other.host_capacity_bytes is not None
    size, room = format_bytes(other.host_bytes), format_bytes(other.host_capacity_bytes)
    whole = f"{HOST_SHARE:.0%} of its {format_bytes(other.host_capacity_bytes / HOST_SHARE)}"
    return f"{size} in a host's memory, which has {room} for what is moved there ({whole})"


def refused_by_host(other: Estimate) -> Refusal | None:
    """Where its device has room and its host has not, the rule that says so with the numbers; else None."""
    if other.fits_host or other.peak_bytes.high > other.capacity_bytes:
        return None
    return Refusal("host_memory", str(other.choice.layout), f"the processes of a node keep {needs_of_host(other)}")


def difference(other: Estimate, first: Estimate) -> str:
    """`-39.0 GB, -11% speed`: what a change does to memory and to samples per second, and whether it fits otherwise.

    Where samples have another length, speed is in tokens: `+1.2 GB, +3% tokens/s`.
    """
    size = other.memory.total - first.memory.total
    speed, noun = _faster(other, first)
    fit = "" if _certainty(other) == _certainty(first) else f", then it {_certainty(other)}"
    host = f", {format_bytes(other.host_bytes)} in each host's memory" if other.host_bytes != first.host_bytes else ""
    if abs(size) < 1 and abs(speed) < NOT_SEEN and not fit and not host:
        same = other.step_seconds == first.step_seconds
        return "changes nothing here" if same else f"changes no memory, and {noun} by less than {NOT_SEEN:.1%}"
    return f"{'+' if size >= 0 else '-'}{format_bytes(abs(size))}, {speed:+.0%} {noun}{host}{fit}"


def _certainty(one: Estimate) -> str:
    """Whether it fits, as all answers say it."""
    if one.fits:
        return "fits"
    return "is not sure to fit" if one.may_fit else "does not fit"


def _faster(other: Estimate, first: Estimate) -> tuple[float, str]:
    """By what share, and of what: samples a second, or tokens where a sample has another number of them."""
    crossed = (
        other.tokens_per_second * first.samples_per_second,
        first.tokens_per_second * other.samples_per_second,
    )
    if math.isclose(*crossed):
        there, here, noun = other.samples_per_second, first.samples_per_second, "speed"
    else:
        there, here, noun = other.tokens_per_second, first.tokens_per_second, "tokens/s"
    return (there / here - 1 if here else 0.0), noun


def _what_grows(slow: StepTime, fast: StepTime) -> str:
    grown = {part.name: getattr(slow, part.name) - getattr(fast, part.name) for part in fields(StepTime)}
    name = max(grown, key=lambda cause: grown[cause])
    return f"{CAUSES[name]} +{format_seconds(grown[name])} a step"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
