"""From calls to operations, and from operations to the units of a model, in the order of its forward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from allranks.model_profile import Cut, Kind
from allranks.profiling.cuts import find_cuts, owner
from allranks.profiling.recording import GIVEN, Call
from allranks.profiling.structure import Structure, is_inside

INPUTS: Final = "inputs"
LOSS: Final = "loss"
"""The units of what runs outside of all modules: before the first of them, and after it."""
_ALONE: Final = ("matmul", "attention", "conv", "embedding", "scan")
"""Kinds of which each kernel is an operation; of the others those that follow each other in one module are one."""


@final
@dataclass(slots=True)
class Piece:
    """An operation as one recording saw it, for all of its samples; fields as in Operation.

    Attributes:
        place: the module's whole name.
        parameters: logical names of those that it is the first to read.
        experts: of how many it computes; 0 elsewhere.
    """

    name: str
    place: str
    kind: Kind
    cut: Cut
    flops: float = 0.0
    shape: tuple[int, ...] = ()
    moved_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: float = 0.0
    output_bytes: int = 0
    parameters: list[str] = field(default_factory=list)
    input_gradient: bool = False
    causal: bool = False
    experts: int = 0


@final
@dataclass(slots=True)
class Segment:
    """A unit of the model that ran at one stretch.

    Attributes:
        unit: the module's logical name, "" for what runs in no unit; INPUTS, LOSS.
        calls: the places of its calls in the recording.
    """

    unit: str
    repeated: bool
    pieces: list[Piece] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    input_bytes: int = 0


def cut_into_segments(calls: Sequence[Call], structure: Structure) -> list[Segment]:
    """The forward's calls by unit; parameters that no call reads stand at the end of their unit, or of the model."""
    cuts = find_cuts(calls, structure)
    units = Units(structure)
    norms = {name for name, member in structure.members() if "Norm" in type(member).__name__}
    segments: list[Segment] = []
    seen: set[str] = set()
    entered = False
    for index, call in enumerate(calls):
        if call.backward or call.from_parameters or not (call.moved_bytes or call.saved_bytes):
            continue
        entered = entered or bool(call.modules)
        unit = units.of(call) if call.modules else LOSS if entered else INPUTS
        last = segments[-1] if segments else None
        # What a model does between two of its blocks belongs to the first of them.
        between = last is not None and last.repeated and not unit and not call.parameters
        if last is None or not (unit == last.unit or between):
            segments.append(last := Segment(unit, unit in units.blocks))
        fresh = [name for name in call.parameters if name not in seen]
        seen.update(fresh)
        piece = _piece_for(last, call, cuts[index], norms, structure)
        _add(piece, call, fresh)
        last.calls.append(index)
    for segment in segments:
        segment.input_bytes = _input_bytes(segment, calls)
    _add_unread(segments, structure, units, seen)
    return segments


@final
class Units:
    """Which unit of the model a call, or a module, belongs to: its outermost part that holds no repeated block."""

    def __init__(self, structure: Structure) -> None:
        self.blocks = frozenset(structure.blocks)
        names = [name for name, _ in structure.members()]
        self._above = {name for name in names if any(is_inside(block, name) for block in self.blocks)} - self.blocks
        self._above |= {
            name for name in structure.modules if any(other != name and is_inside(other, name) for other in names)
        }

    def of(self, call: Call) -> str:
        """The unit of a call of a module; "" for the model's own."""
        return self.of_path((*call.modules, owner(call)))

    def of_path(self, path: Sequence[str]) -> str:
        """The unit of a module, by the names of those around it and its own."""
        block = next((name for name in path if name in self.blocks), None)
        return block if block is not None else next((name for name in path if name not in self._above), "")


def _piece_for(segment: Segment, call: Call, cut: Cut, norms: set[str], structure: Structure) -> Piece:
    """The operation that a call is, or is part of."""
    place, kind = owner(call), call.kind
    if segment.unit == LOSS and kind not in _ALONE:
        kind = "loss"
    elif kind == "elementwise" and place in norms:
        kind = "norm"
    if segment.pieces and kind not in _ALONE:
        last = segment.pieces[-1]
        if (last.place, last.kind, last.cut) == (place, kind, cut):
            return last
    name = place[len(segment.unit) :].lstrip(".") if is_inside(place, segment.unit) else place
    experts = next((number for module, number in structure.experts.items() if is_inside(place, module)), 0)
    piece = Piece(name or call.op, place, kind, cut, shape=call.shape, experts=experts)
    segment.pieces.append(piece)
    return piece


def _add(piece: Piece, call: Call, fresh: Sequence[str]) -> None:
    piece.flops += call.flops
    piece.moved_bytes += call.moved_bytes
    piece.saved_bytes += call.saved_bytes
    piece.output_bytes = call.output_bytes
    piece.parameters += fresh
    piece.input_gradient |= any(read.wants for read in call.inputs)
    piece.causal |= call.causal


def _input_bytes(segment: Segment, calls: Sequence[Call]) -> int:
    """Of what was made elsewhere and carries a gradient on; where nothing does, of all activations from elsewhere."""
    own = set(segment.calls)
    reads = {read.serial: read for index in segment.calls for read in calls[index].inputs if read.producer not in own}
    made = [read.num_bytes for read in reads.values() if read.wants and read.producer != GIVEN]
    return sum(made) if made else sum(read.num_bytes for read in reads.values() if not read.is_buffer)


def low_shares(segments: Sequence[Segment], gathered: Sequence[Segment]) -> list[float]:
    """`Block.low_share` of each: its bytes with weights as FSDP gathers them over those with whole ones.

    1 where the two did not run the same units.
    """
    if [segment.unit for segment in segments] != [segment.unit for segment in gathered]:
        return [1.0] * len(segments)
    sizes = [(_stream_bytes(whole), _stream_bytes(low)) for whole, low in zip(segments, gathered, strict=True)]
    return [low / whole if whole and low else 1.0 for whole, low in sizes]


def _stream_bytes(segment: Segment) -> int:
    """What enters; of what embeds before the blocks (or behind them) what its tables give: ids have one type."""
    embedded = sum(piece.output_bytes for piece in segment.pieces if piece.kind == "embedding")
    return segment.input_bytes if segment.repeated or not embedded else embedded


def _add_unread(segments: list[Segment], structure: Structure, units: Units, seen: set[str]) -> None:
    for name in structure.parameters:
        if name in seen:
            continue
        parts = name.split(".")[:-1]
        path = [".".join(parts[:length]) for length in range(len(parts) + 1)]
        unit = units.of_path(path)
        segment = next((found for found in segments if found.unit == unit), None)
        if segment is None:
            segments.append(segment := Segment(unit, unit in units.blocks))
        if not (segment.pieces and segment.pieces[-1].name == "unread" and segment.pieces[-1].place == path[-1]):
            segment.pieces.append(Piece("unread", path[-1], "elementwise", ""))
        segment.pieces[-1].parameters.append(name)
