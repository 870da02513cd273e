"""Which entries of a batch are sequences, and which of their positions this rank has.

Inputs and targets are cut alike, so that each position meets its own target. Under ring attention the cut is balanced:
of 2 * cp chunks rank r has chunks r and 2 * cp - 1 - r, because under a causal mask the last positions have most to do.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.task_loading import describe

SEQUENCE_DIM = 1  # of an entry that nobody has described: [samples, positions, ...]


@final
@dataclass(frozen=True, slots=True)
class Share:
    """This rank's positions of every sequence.

    Attributes:
        rank: among those that share a sequence.
        num_ranks: how many these are.
        balanced: whether each has a chunk from the front and its mirror image from the back; else one chunk.
    """

    rank: int
    num_ranks: int
    balanced: bool = False

    @property
    def num_chunks(self) -> int:
        """The equal chunks that a sequence is cut into."""
        return self.num_ranks * (2 if self.balanced else 1)

    def take(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of `value` along `dim`, whose length `num_chunks` divides; contiguous."""
        length = value.shape[dim] // self.num_chunks
        chunks = [self.rank, self.num_chunks - 1 - self.rank] if self.balanced else [self.rank]
        return torch.cat([value.narrow(dim, chunk * length, length) for chunk in chunks], dim).contiguous()

    @property
    def own_chunks(self) -> int:
        """How many of them are this rank's."""
        return 2 if self.balanced else 1

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole of which rank r's part, as `take` gives it, is `parts[r]`."""
        chunks: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            first, *mirrored = part.chunk(self.own_chunks, dim)
            chunks[rank] = first
            if mirrored:
                chunks[self.num_chunks - 1 - rank] = mirrored[0]
        return torch.cat([chunks[place] for place in range(self.num_chunks)], dim)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Where in a sequence of `length` this rank's positions lie, int64."""
        return self.take(torch.arange(length, device=device), 0)

    def check(self, name: str, length: int) -> None:
        """Raise LayoutError, with the nearest lengths that work, where the ranks cannot have equal shares."""
        if length % self.num_chunks == 0:
            return
        below = length // self.num_chunks * self.num_chunks
        above = below + self.num_chunks
        fits = f"{below} or {above} do" if below else f"{above} does"
        what = f"2 * cp({self.num_ranks}) = {self.num_chunks}" if self.balanced else f"cp({self.num_ranks})"
        why = ", because ring attention gives each process two chunks" if self.balanced else ""
        raise LayoutError(f"{what} does not divide the {length} positions of {name}{why}: {fits}")


@final
@dataclass(frozen=True, slots=True)
class Sequences:
    """The entries of a batch that are sequences.

    Attributes:
        dims: entry -> the dim of its positions. An entry of a dict has its key, one of a tuple its index, nested ones
            both ("0", "tokens", "inputs.tokens"); a batch that is one tensor is "".
        because: how they were found.
    """

    dims: Mapping[str, int]
    because: str

    def cut(self, batch: Any, share: Share) -> tuple[Any, int]:
        """`batch` with this rank's positions of every sequence in it, and their length in the whole.

        Raises:
            LayoutError: lengths that do not divide, or differ.
        """
        lengths: dict[str, int] = {}

        def cut(path: Any, leaf: Any) -> Any:
            name = _name(path)
            if name not in self.dims or not isinstance(leaf, torch.Tensor):
                return leaf
            lengths[name] = leaf.shape[self.dims[name]]
            share.check(_say(name), lengths[name])
            return share.take(leaf, self.dims[name])

        found = pytree.tree_map_with_path(cut, batch)
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{_say(name)} has {length} positions" for name, length in lengths.items())
            raise LayoutError(f"cp cuts sequences of one length only, and {shown}: use cp=1")
        if not lengths:
            raise LayoutError(f"a batch is {describe(batch)}, without {', '.join(map(_say, self.dims))}, which cp cuts")
        return found, next(iter(lengths.values()))

    def shorten(self, batch: Any, chunks: int, length: int) -> Any:
        """`batch` with the first `length` positions of each of `chunks` equal chunks of every sequence in it."""

        return self.each(batch, lambda leaf, dim: shorten(leaf, dim, chunks, length))

    def each(self, batch: Any, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
        """`batch` with what `change` makes of every sequence in it and the dim of its positions."""

        def of_leaf(path: Any, leaf: Any) -> Any:
            dim = self.dims.get(_name(path))
            return leaf if dim is None or not isinstance(leaf, torch.Tensor) else change(leaf, dim)

        return pytree.tree_map_with_path(of_leaf, batch)

    def dim_in(self, batch: Any) -> int:
        """The dim of the positions in the first sequence of `batch`, counted from the front."""
        leaves, _ = pytree.tree_flatten_with_path(batch)
        named = ((_name(path), leaf) for path, leaf in leaves)
        found: list[int] = [self.dims[name] % leaf.ndim for name, leaf in named if name in self.dims]
        return found[0]


def shorten(value: torch.Tensor, dim: int, chunks: int, length: int) -> torch.Tensor:
    """The first `length` of each of `chunks` equal chunks along `dim`."""
    dim %= value.ndim
    in_chunks: torch.Tensor = value.unflatten(dim, (chunks, -1))
    return in_chunks.narrow(dim + 1, 0, length).flatten(dim, dim + 1)


def repeat_last(value: torch.Tensor, dim: int) -> torch.Tensor:
    """`value` with its last half along `dim` in place of its first, too; of an odd length the middle stays."""
    length = value.shape[dim]
    half = length // 2
    return torch.cat([value.narrow(dim, length - half, half), value.narrow(dim, half, length - half)], dim)


def find_sequences(batch: Any, arguments: Any, hints: Mapping[str, int]) -> Sequences:
    """The sequences in a batch like this one.

    Args:
        batch: as `collate` made it, whole.
        arguments: of forward, as they come out of it.
        hints: `hints().sequence_dims`: entry, or a glob, -> dim. Without any, the first argument of at least two dims
            is [samples, positions, ...], and every entry with as many positions in dim 1 is a sequence.

    Raises:
        LayoutError: a hint matches no entry, or none is found.
    """
    leaves, _ = pytree.tree_flatten_with_path(batch)
    entries = {_name(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    if hints:
        return Sequences(_match(entries, hints), "hints().sequence_dims says so")
    inputs = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    first = next((leaf for leaf in inputs if leaf.ndim > SEQUENCE_DIM), None)
    advice = 'name the entries that cp cuts in hints().sequence_dims, for example {"x": 1, "y": 1}'
    if first is None:
        raise LayoutError(f"forward gets no tensor [samples, positions, ...] from {describe(batch)}: {advice}")
    length = first.shape[SEQUENCE_DIM]
    dims = {
        name: SEQUENCE_DIM
        for name, leaf in entries.items()
        if leaf.ndim > SEQUENCE_DIM and leaf.shape[SEQUENCE_DIM] == length
    }
    if not dims:
        raise LayoutError(
            f"forward gets {length} positions, but no entry of the batch, {describe(batch)}, has as many in dim 1. "
            "Where inputs() or loss() shifts a sequence, let the dataset give inputs and targets of one length; or "
            f"{advice}"
        )
    return Sequences(dims, f"they have the {length} positions of forward's first argument in dim 1")


def _match(entries: Mapping[str, torch.Tensor], hints: Mapping[str, int]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for pattern, dim in hints.items():
        names = [name for name in entries if fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, entries, n=1)
            known = f"; did you mean {near[0]!r}?" if near else f"; the entries are {_list(list(entries))}"
            raise LayoutError(f"hints().sequence_dims names {pattern!r}, which no tensor of the batch has{known}")
        for name in names:
            if not -entries[name].ndim <= dim < entries[name].ndim:
                raise LayoutError(f"hints().sequence_dims: {_say(name)} has no dim {dim}: {describe(entries[name])}")
            if dims.setdefault(name, dim) != dim:
                raise LayoutError(f"hints().sequence_dims: two of its names match {_say(name)}, with other dims")
    return dims


def _name(path: Sequence[Any]) -> str:
    """Of the keys on the way to an entry: `inputs.tokens`."""
    parts = (next(v for a in ("key", "idx", "name") if (v := getattr(key, a, None)) is not None) for key in path)
    return ".".join(map(str, parts))


def _say(name: str) -> str:
    return f"entry {name!r}" if name else "the batch"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
