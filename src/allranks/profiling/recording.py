"""What was seen of one step of a model: its kernels in order, what each read, and what it left for the backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from allranks.model_profile import Kind

GIVEN: Final = -1
"""The producer of what was there before the step: the batch, buffers, constants."""


@final
@dataclass(frozen=True, slots=True)
class Read:
    """One activation that a kernel reads.

    Attributes:
        serial: of its storage.
        producer: the call that wrote it last; GIVEN for what was there before.
        wants: whether it needs a gradient.
        is_buffer: whether it belongs to the model.
    """

    serial: int
    producer: int
    num_bytes: int
    wants: bool
    is_buffer: bool = False


@final
@dataclass(slots=True)
class Call:
    """One kernel.

    Attributes:
        op: aten's name of it.
        modules: the modules that were running, outermost first, by logical name; () outside all of them.
        inputs: the activations that it reads.
        moved_bytes: activations that it reads and writes.
        parameters: logical names of those it reads, itself or as a copy.
        saved_bytes: what the backward keeps that no call before has counted; given_bytes: of these, what was there
            before the step.
        from_parameters: whether it reads parameters alone (a cast): no sample has a part in it.
    """

    op: str
    modules: tuple[str, ...]
    backward: bool
    kind: Kind
    flops: float
    shape: tuple[int, ...]
    inputs: tuple[Read, ...]
    moved_bytes: int
    output_bytes: int
    parameters: tuple[str, ...]
    from_parameters: bool
    causal: bool = False
    saved_bytes: int = 0
    given_bytes: int = 0


@final
@dataclass(slots=True)
class Memory:
    """One storage, as long as it lives.

    Attributes:
        serial: unlike any other's of the recording.
        producer: the call that wrote it last.
        parameters: the names of those that it holds or was computed from alone; () for an activation.
        made: whether the step itself has made it.
        counted: whether it has been counted as saved.
        is_buffer: whether it holds a buffer of the model.
        alive: a weak reference to it.
    """

    serial: int
    num_bytes: int
    producer: int
    parameters: tuple[str, ...] = ()
    made: bool = False
    counted: bool = False
    is_buffer: bool = False
    alive: Any = None


@final
@dataclass(slots=True)
class Recording:
    """What was seen.

    Attributes:
        calls: forward and backward, in order.
        weight_copy_bytes: kept for the backward, computed from parameters alone.
        events: (storage, bytes that it takes, negative: gives back, the last call by then), in order; parameters'
            gradients and copies aside.
    """

    calls: list[Call] = field(default_factory=list)
    weight_copy_bytes: int = 0
    events: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        """Activations kept for the backward, all of them."""
        return sum(call.saved_bytes for call in self.calls)

    def peak_bytes(self) -> int:
        """The most that was alive at once of what the step itself made: activations and their gradients."""
        live = peak = 0
        for _, change, _ in self.events:
            live += change
            peak = max(peak, live)
        return peak

    def loss_bytes(self, places: Sequence[int]) -> int:
        """The most that a loss has at once, beside what the model before it has kept for its backward.

        From its first call, at one of `places`, until the backward comes to the first parameter: what the loss makes
        and keeps, the gradients on the way, and what of the model's output nobody kept.
        """
        first, last = places[0], places[-1]
        rest = range(last + 1, len(self.calls))
        end = next((at for at in rest if self.calls[at].backward and self.calls[at].parameters), len(self.calls))
        live = before = peak = 0
        for _, change, at in self.events:
            live += change
            if at < first:
                before = live
            elif at < end:
                peak = max(peak, live)
        forward = [call for call in self.calls[:first] if not call.backward]
        kept = sum(call.saved_bytes - call.given_bytes for call in forward)
        mine = [self.calls[at] for at in places]
        beside = peak - min(kept, before) + sum(call.given_bytes for call in mine)
        return max(beside, sum(call.saved_bytes for call in mine))

    def backward_flops(self) -> float:
        """Of all backwards."""
        return sum(call.flops for call in self.calls if call.backward)
