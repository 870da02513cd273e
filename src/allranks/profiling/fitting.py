"""From recordings of one step with two numbers of samples to what one sample costs: a ModelProfile."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, final

from torch import nn

from allranks.model_profile import Block, ModelProfile, Operation
from allranks.profiling.cache import with_digest
from allranks.profiling.recording import Recording
from allranks.profiling.segments import Piece, Segment, cut_into_segments, low_shares
from allranks.profiling.structure import Structure


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """The recording of a step of so many samples and targets."""

    num_samples: int
    num_targets: int
    recording: Recording


def build_profile(
    structure: Structure,
    seen: Sequence[Seen],
    gathered: Seen | None = None,
    *,
    precision: str,
    source: Literal["traced", "measured"],
) -> ModelProfile:
    """The profile from one or two recordings.

    With two, of different numbers of samples, what grows with them is told from what does not; with one, or where the
    two ran different operations, everything is divided by the samples of the last.

    Args:
        gathered: the last one's forward with weights as FSDP gathers them; None where they are as in `seen`.
    """
    parts = [_segments(one.recording, structure) for one in seen]
    if len(parts) > 1 and _outline(parts[0]) != _outline(parts[1]):
        seen, parts = seen[-1:], parts[-1:]
    fit = _Fit([one.num_samples for one in seen])
    tokens = max(1, round(seen[-1].num_targets / seen[-1].num_samples))
    attention = [p.shape for s in parts[-1] for p in s.pieces if p.kind == "attention" and p.shape]
    seq = max((shape[0] for shape in attention), default=0)
    low = [1.0] * len(parts[-1])
    if gathered is not None:
        low = low_shares(parts[-1], cut_into_segments(gathered.recording.calls, structure))
    blocks = [
        replace(_block(structure, fit, alike, seq or tokens), low_share=share)
        for alike, share in zip(zip(*parts, strict=True), low, strict=True)
    ]
    found = ModelProfile(
        name=structure.name,
        blocks=tuple(_join_equal(blocks)),
        precision=precision,
        tokens=tokens,
        seq=seq,
        heads=math.gcd(*(shape[2] for shape in attention)),
        kv_heads=math.gcd(*(shape[3] for shape in attention)),
        experts=max(structure.experts.values(), default=0),
        vocab=_vocabulary(structure),
        stateful=structure.stateful,
        tied=structure.tied,
        tensor_parallel=bool(structure.styles),
        context_parallel=bool(attention) and not structure.coupled,
        coupled=structure.coupled,
        source=source,
        facts=_facts(structure, fit, [one.recording for one in seen]),
    )
    return with_digest(found)


@final
class _Fit:
    """A line through what one or two numbers of samples cost."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples

    def slope(self, values: Sequence[float]) -> float:
        """For each sample more."""
        if len(values) == 1:
            return values[0] / self._samples[0]
        return (values[1] - values[0]) / (self._samples[1] - self._samples[0])

    def constant(self, values: Sequence[float]) -> float:
        """For none."""
        return values[-1] - self.slope(values) * self._samples[-1]

    def extents(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """A product's shape for one sample: its rows grow with the samples, its features do not."""
        if not shapes[0]:
            return ()
        rows = self.slope([float(shape[0]) for shape in shapes]) or shapes[-1][0]
        return (max(1, round(rows)), *shapes[-1][1:])


def _segments(recording: Recording, structure: Structure) -> list[Segment]:
    """The forward by unit; the pieces of a loss share what all of it holds at its peak, by what each keeps of it."""
    segments = cut_into_segments(recording.calls, structure)
    for segment in segments:
        pieces = [piece for piece in segment.pieces if piece.kind == "loss"]
        if pieces and segment.calls:
            _share_peak(pieces, recording.loss_bytes(segment.calls))
    return segments


def _share_peak(pieces: Sequence[Piece], peak_bytes: float) -> None:
    """One that keeps nothing has none of it; where none keeps anything, the first has all."""
    kept = sum(piece.saved_bytes for piece in pieces)
    pieces[0].peak_bytes = 0.0 if kept else peak_bytes
    for piece in pieces if kept else ():
        piece.peak_bytes = peak_bytes * piece.saved_bytes / kept


def _outline(segments: Sequence[Segment]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [(segment.unit, [(p.name, p.kind, p.cut) for p in segment.pieces]) for segment in segments]


def _block(structure: Structure, fit: _Fit, alike: Sequence[Segment], seq: int) -> Block:
    first = alike[0]
    pieces = zip(*(segment.pieces for segment in alike), strict=True)
    found = [_operation(structure, fit, same, seq) for same in pieces]
    return Block(
        name=first.unit or "model",
        operations=tuple(operation for operation in found if _costs(operation)),
        input_bytes=fit.slope([segment.input_bytes for segment in alike]),
        repeated=first.repeated,
    )


def _operation(structure: Structure, fit: _Fit, same: Sequence[Piece], seq: int) -> Operation:
    first = same[0]
    owned = {id(structure.parameters[name]): structure.parameters[name] for name in first.parameters}.values()
    shape = first.shape if first.kind == "attention" else fit.extents([piece.shape for piece in same])
    rows = shape[0] if shape and first.experts and first.kind == "matmul" else 0
    return Operation(
        name=first.name,
        kind=first.kind,
        flops=fit.slope([piece.flops for piece in same]),
        shape=shape,
        moved_bytes=fit.slope([piece.moved_bytes for piece in same]),
        saved_bytes=fit.slope([piece.saved_bytes for piece in same]),
        peak_bytes=fit.slope([piece.peak_bytes for piece in same]),
        output_bytes=fit.slope([piece.output_bytes for piece in same]),
        parameters=sum(tensor.numel() for tensor in owned),
        parameter_bytes=float(sum(tensor.numel() * tensor.element_size() for tensor in owned)),
        trained=any(tensor.requires_grad for tensor in owned) if owned else True,
        input_gradient=first.input_gradient,
        cut=first.cut,
        active=min(1.0, rows / (seq * first.experts)) if rows and seq else 1.0,
        causal=first.causal,
        gathered=first.cut == "vocab" and first.kind == "matmul" and not structure.loss_parallel,
    )


def _costs(operation: Operation) -> bool:
    """Whether a sample more costs anything in it, or it holds parameters: tables of constants are made once a step."""
    return any((operation.parameters, operation.flops, operation.moved_bytes, operation.saved_bytes))


def _join_equal(blocks: Sequence[Block]) -> list[Block]:
    """Repeated blocks that cost the same, one after the other, as one with a count.

    Their stream is the widest of theirs: the first may get from an embedding what the others get from sums.
    """
    joined = []
    for key, group in groupby(blocks, key=lambda b: (b.operations, b.input_bytes) if b.repeated else b.name):
        members = list(group)
        first = members[0]
        if not first.repeated or isinstance(key, str):
            joined += members
            continue
        name = first.name if len(members) == 1 else _pattern([member.name for member in members])
        widest = max(member.low_share for member in members)
        joined.append(replace(first, name=name, count=len(members), low_share=widest))
    return joined


def _pattern(names: Sequence[str]) -> str:
    """`layers.*` for `layers.0`, `layers.1`: a star for each part in which they differ."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def _vocabulary(structure: Structure) -> int:
    """The rows of the table that tensor parallelism cuts; without a plan, of the largest one."""
    named = dict(structure.members())
    cut = [named[name] for name, style in structure.styles.items() if style == "vocab" and name in named]
    tables = [m for m in cut or named.values() if isinstance(m, nn.Embedding)]
    return max((table.num_embeddings for table in tables), default=0)


def _facts(structure: Structure, fit: _Fit, recordings: Sequence[Recording]) -> dict[str, float]:
    """Figures of the whole step, named by what they count; docs/explanation/planner-profile.md says how."""
    peaks = [float(recording.peak_bytes()) for recording in recordings]
    saved = [float(recording.saved_bytes) for recording in recordings]
    backward = [recording.backward_flops() for recording in recordings]
    return {
        "backward_flops": fit.slope(backward),
        "saved_bytes": fit.slope(saved),
        "saved_constant_bytes": fit.constant(saved),
        "peak_bytes": fit.slope(peaks),
        "peak_constant_bytes": fit.constant(peaks),
        "weight_copy_bytes": float(recordings[-1].weight_copy_bytes),
        "buffer_bytes": float(sum(buffer.nbytes for buffer in structure.buffers)),
    }
