"""Two checkpoints, tensor by tensor in logical space: whatever layouts wrote them, what is not the same.

Where dtype, shape and digest agree, no value is read: a tensor's digest is the same for every layout (law 9). Of the
others both are read, one tensor at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, final

import torch

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.index import Index, read_index
from allranks.checkpointing.manifest import TensorRecord, encode_state
from allranks.checkpointing.restore import read_whole


@final
@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One logical tensor that is not the same.

    Attributes:
        what: "missing" (only the first has it), "extra" (only the second), "reshaped", "retyped" (the same values where
            `elements` is 0), or "altered".
        first, second: dtype and shape in either, "" where it is not there.
        elements: how many differ; 0 where no values were compared. Two NaN at one place do not. Whole numbers are
            compared exactly with each other, and with floating ones in float64.
        absolute: the largest difference of two finite elements, found at `index`; inf where one of two is not finite.
        relative: `absolute` over the largest finite magnitude of the first.
    """

    name: str
    what: str
    first: str
    second: str
    elements: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    index: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """What two checkpoints do not have in common.

    Attributes:
        num_equal: tensors that are the same.
        tensors: those that are not, as the first orders them, then what only the second has.
        aliases: alias -> (what it is in the first, in the second), None where it is none.
        state: path of a value that is no tensor -> (in the first, in the second), as JSON; None where it is not there.
    """

    num_equal: int
    tensors: tuple[TensorDifference, ...]
    aliases: Mapping[str, tuple[str | None, str | None]]
    state: Mapping[str, tuple[Any, Any]]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.tensors or self.aliases or self.state)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; a number that is not finite becomes its name ("inf")."""
        rows = [
            {key: str(value) if isinstance(value, float) and not isfinite(value) else value for key, value in row}
            for row in (asdict(difference).items() for difference in self.tensors)
        ]
        aliases = {name: list(pair) for name, pair in self.aliases.items()}
        state = {name: list(pair) for name, pair in self.state.items()}
        return {
            "equal": self.equal,
            "num_equal": self.num_equal,
            "tensors": rows,
            "aliases": aliases,
            "state": state,
        }


def compare(first: Checkpoint, second: Checkpoint) -> Comparison:
    """What differs between two checkpoints.

    Raises:
        CheckpointError: a file whose values had to be read is damaged.
    """
    ours, theirs = first.manifest, second.manifest
    names = [*ours.tensors, *(name for name in theirs.tensors if name not in ours.tensors)]
    indexes = _Indexes((first, second))
    found = [difference for name in names if (difference := _compare_tensor(first, second, name, indexes)) is not None]
    aliases = dict.fromkeys([*ours.aliases, *theirs.aliases])
    pairs = {name: (ours.aliases.get(name), theirs.aliases.get(name)) for name in aliases}
    state, other = dict(_leaves(encode_state(ours.state))), dict(_leaves(encode_state(theirs.state)))
    values = {path: (state.get(path), other.get(path)) for path in dict.fromkeys([*state, *other])}
    return Comparison(
        num_equal=len(names) - len(found),
        tensors=tuple(found),
        aliases={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        state={path: pair for path, pair in values.items() if pair[0] != pair[1]},
    )


class _Indexes:
    """Where the tensors of two checkpoints lie, read once, and only if values are asked for."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._checkpoints = checkpoints
        self._read = list[Index]()

    def values(self, name: str) -> list[torch.Tensor]:
        """That tensor of each, whole."""
        self._read = self._read or [read_index(one.path, one.manifest) for one in self._checkpoints]
        pairs = zip(self._checkpoints, self._read, strict=True)
        return [read_whole(one, "", (name,), index=index)[name] for one, index in pairs]


def _compare_tensor(first: Checkpoint, second: Checkpoint, name: str, indexes: _Indexes) -> TensorDifference | None:
    ours, theirs = first.manifest.tensors.get(name), second.manifest.tensors.get(name)
    if ours == theirs:
        return None
    told = _told(ours), _told(theirs)
    if ours is None or theirs is None:
        return TensorDifference(name, "extra" if ours is None else "missing", *told)
    if ours.shape != theirs.shape:
        return TensorDifference(name, "reshaped", *told)
    a, b = indexes.values(name)
    return _compare_values(name, "altered" if ours.dtype == theirs.dtype else "retyped", told, a, b)


def _told(record: TensorRecord | None) -> str:
    return "" if record is None else f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}"


def _compare_values(name: str, what: str, told: tuple[str, str], a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    whole = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in (a, b))
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    exact = _subtract_whole(a, b) if whole else None
    a, b = a.to(wide).reshape(a.shape), b.to(wide).reshape(b.shape)
    differs = (a != b) & ~(a.isnan() & b.isnan()) if exact is None else exact != 0
    apart = (a - b if exact is None else exact).abs()
    # Of two infinities of one sign the difference is no number, and they are equal; of a NaN and a number it is inf.
    apart = torch.where(differs, apart.nan_to_num(nan=float("inf"), posinf=float("inf")), torch.zeros_like(apart))
    if not apart.numel():
        return TensorDifference(name, what, *told)
    place = int(apart.argmax())
    largest = float(apart.reshape(-1)[place])
    magnitude = float(a.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    relative = largest / magnitude if magnitude else (float("inf") if largest else 0.0)
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape)) if a.dim() else ()
    return TensorDifference(name, what, *told, int(differs.sum()), largest, relative, index)


def _subtract_whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b of whole numbers or bools as float64, which is 0 only where they are equal: float64 has not all of them."""
    (high, low), (other_high, other_low) = _halves(a), _halves(b)
    return (high - other_high).double() * 2.0**32 + (low - other_low).double()


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) with tensor = high * 2**32 + low, as int64."""
    bits = tensor.to(torch.int64)  # those of uint64 wrap around
    high = bits >> 32
    return high & 0xFFFFFFFF if tensor.dtype == torch.uint64 else high, bits & 0xFFFFFFFF


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, JSON value) of everything in a state that holds nothing else; an empty table is one, too."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
