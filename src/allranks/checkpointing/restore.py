"""Loading a checkpoint into tensors cut in any way: box by box, each chunk read, hashed and copied once.

A process reads the headers of all files (or is given what they say: divided.py), and of the data only the chunks in
which its own boxes lie. A part that lands
whole in contiguous host memory is copied straight there; any other goes through a buffer of its own size.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.index import Index, read_index
from allranks.checkpointing.index_table import IndexTable
from allranks.checkpointing.parts import Parts, stored_parts
from allranks.checkpointing.tensor_file import DTYPES, OpenFile, Part
from allranks.errors import CheckpointError
from allranks.parameter_map import Box, Entry

Job = tuple[Part, Box, torch.Tensor]  # a part, and a local tensor with the box at which it lies

_NAMED = 10  # differences in one message
_OF_ONE_RANK = re.compile(r".+@dp\d+")


def name_of_rank(name: str, dp_rank: int) -> str:
    """What a tensor that each data-parallel rank has learnt by itself is called, as that rank has it."""
    return f"{name}@dp{dp_rank}"


def is_of_one_rank(name: str) -> bool:
    """Whether it is such a name."""
    return _OF_ONE_RANK.fullmatch(name) is not None


def restore(
    checkpoint: Checkpoint,
    parts: Parts,
    names: Collection[str] | None = None,
    num_threads: int = 2,
    index: Index | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill this rank's tensors in place from the checkpoint, whatever Layout wrote it.

    Aliases and entries that are not persistent are passed over: a checkpoint holds neither.

    Args:
        checkpoint: an open one.
        parts: this rank's local part of every tensor it holds.
        names: all the tensors the program has, where this rank holds only some of them; otherwise those of `parts`.
        num_threads: that read and hash ahead.
        index: the checkpoint's, where it has been read; by default this process reads all headers.
        progress: called after each chunk.

    Raises:
        CheckpointError: a tensor is missing, left over, or of another shape or dtype (nothing was copied then), or a
            file is damaged (some tensors were filled, and the program must not go on with them).
    """
    stored = stored_parts(parts)
    _check_match(checkpoint, [entry for entry, _ in stored], names)
    index = read_index(checkpoint.path, checkpoint.manifest) if index is None else index
    jobs = ((part, e.box, tensor) for e, tensor in stored for part in _parts_at(index, e.name, e.box))
    fill(checkpoint, jobs, num_threads, progress)


def _parts_at(index: Index, name: str, box: Box) -> Sequence[Part]:
    """Those parts of a tensor that `box` may need."""
    return index.meeting(name, box) if isinstance(index, IndexTable) else index[name]


def read_whole(
    checkpoint: Checkpoint,
    prefix: str = "model.",
    names: Collection[str] | None = None,
    num_threads: int = 2,
    index: Index | None = None,
) -> dict[str, torch.Tensor]:
    """Whole tensors on the host, for one process: those under `prefix`, by their names without it. Tied ones are one.

    What single ranks have learnt is left out unless it is named: its mean stands under the plain name.

    Args:
        checkpoint: an open one.
        prefix: "" takes everything.
        names: only these, as in the checkpoint, with prefix.
        num_threads: that read and hash ahead.
        index: the checkpoint's, where it has been read.

    Raises:
        CheckpointError: one of `names` is not there, or a file is damaged.
    """
    manifest = checkpoint.manifest
    owners = {name: name for name in manifest.tensors} | manifest.aliases
    if names is not None and not set(names) <= owners.keys():
        unknown = [repr(name) for name in sorted(set(names) - owners.keys())]
        raise CheckpointError(f"{checkpoint.path} has no {_listed(unknown)}")
    wanted = [name for name in owners if name.startswith(prefix) and (names is None or name in names)]
    wanted = [name for name in wanted if names is not None or not is_of_one_rank(name)]
    # First: it sees that the bytes for every shape are really there.
    index = read_index(checkpoint.path, manifest) if index is None else index
    whole = {}
    for name in dict.fromkeys(owners[name] for name in wanted):
        record = manifest.tensors[name]
        whole[name] = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
    jobs = ((part, Box.whole(part.shape), tensor) for name, tensor in whole.items() for part in index[name])
    fill(checkpoint, jobs, num_threads)
    return {name.removeprefix(prefix): whole[owners[name]] for name in wanted}


def read_model_values(checkpoint: Checkpoint, which: str = "", *, ema: bool = False) -> dict[str, torch.Tensor]:
    """The model's tensors, or those of the one called `which`, whole on the host, by their names in it.

    Args:
        checkpoint: an open one.
        which: of several models.
        ema: parameters are the averages that were kept of them.

    Raises:
        CheckpointError: it holds no averages, or a file is damaged.
    """
    below = f"{which}." if which else ""
    values = read_whole(checkpoint, f"model.{below}")
    if not ema:
        return values
    if not any(name.startswith("ema.") for name in checkpoint.manifest.tensors):
        raise CheckpointError(
            f"{checkpoint.path} holds no average of the parameters: it is kept where train.ema is set"
        )
    return values | read_whole(checkpoint, f"ema.{below}")


class _Piece:
    """What a part of the checkpoint and a local tensor have in common: a run of the file's bytes, and where they go."""

    def __init__(self, part: Part, common: Box, box: Box, tensor: torch.Tensor) -> None:
        item_bytes = DTYPES[part.dtype][1]
        self._strides = _row_major(part.box.shape)
        corner = (a - b for a, b in zip(common.offset, part.box.offset, strict=True))
        low = sum(at * stride for at, stride in zip(corner, self._strides, strict=True))
        num_elements = 1 + sum(
            (extent - 1) * stride for extent, stride in zip(common.shape, self._strides, strict=True)
        )
        self.start = part.start + low * item_bytes
        self.stop = self.start + num_elements * item_bytes
        place = (slice(a - b, a - b + n) for a, b, n in zip(common.offset, box.offset, common.shape, strict=True))
        self._target = tensor.detach()[tuple(place)]
        self._straight = num_elements == common.num_elements and self._target.is_cpu and self._target.is_contiguous()
        self._buffer: torch.Tensor | None = None

    def receive(self, offset: int, data: memoryview) -> None:
        """Take what belongs here of the file's bytes at `offset`, and let them go on when they are the last."""
        if self._buffer is None:
            run = self._target.reshape(-1).view(torch.uint8) if self._straight else None
            self._buffer = torch.empty(self.stop - self.start, dtype=torch.uint8) if run is None else run
        first, last = max(self.start, offset), min(self.stop, offset + len(data))
        buffer: Any = self._buffer.numpy()
        memoryview(buffer)[first - self.start : last - self.start] = data[first - offset : last - offset]
        if last == self.stop:
            if not self._straight:
                run = self._buffer.view(self._target.dtype)
                self._target.copy_(run.as_strided(self._target.shape, self._strides))
            self._buffer = None


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def fill(
    checkpoint: Checkpoint, jobs: Iterable[Job], num_threads: int = 2, progress: Callable[[], None] = lambda: None
) -> None:
    """Copy from each part what its tensor, which lies at that box, has in common with it; check nothing but the bytes.

    `progress` is called after each chunk.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    by_file: dict[str, list[_Piece]] = {}
    for part, box, tensor in jobs:
        common = part.box.intersect(box)
        if common is not None:
            by_file.setdefault(part.file, []).append(_Piece(part, common, box, tensor))
    for name, pieces in by_file.items():
        with closing(OpenFile(checkpoint.path, name, checkpoint.manifest.files[name])) as file:
            for _ in _fill_from(file, sorted(pieces, key=lambda piece: piece.start), num_threads):
                progress()


def _fill_from(file: OpenFile, pieces: Sequence[_Piece], num_threads: int) -> Iterator[None]:
    """Hand each chunk, once, to all pieces that need some of it, and yield."""
    waiting, under_way = deque(pieces), list[_Piece]()
    for offset, data in file.chunks(file.covering([(piece.start, piece.stop) for piece in pieces]), num_threads):
        while waiting and waiting[0].start < offset + len(data):
            under_way.append(waiting.popleft())
        for piece in under_way:
            piece.receive(offset, data)
        under_way = [piece for piece in under_way if piece.stop > offset + len(data)]
        yield


def _check_match(checkpoint: Checkpoint, entries: Sequence[Entry], names: Collection[str] | None) -> None:
    manifest = checkpoint.manifest
    wanted = {entry.name for entry in entries} | set(names or ())
    problems = [
        f"{name!r} is not in the checkpoint" + _tied(manifest.aliases.get(name))
        for name in sorted(wanted - manifest.tensors.keys())
    ]
    problems += [f"{name!r} is only in the checkpoint" for name in sorted(manifest.tensors.keys() - wanted)]
    for entry in entries:
        record = manifest.tensors.get(entry.name)
        if record is not None and (record.shape, record.dtype) != (tuple(entry.shape), entry.dtype):
            theirs, ours = (
                f"{dtype}{list(shape)}" for dtype, shape in ((record.dtype, record.shape), (entry.dtype, entry.shape))
            )
            problems.append(f"{entry.name!r} is {theirs} in the checkpoint and {ours} here")
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not fit: {_listed(problems, '; ')}. Use the model and settings it was saved with"
        )


def _tied(name: str | None) -> str:
    return f" (there it is tied to {name!r})" if name else ""


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    more = [f"and {len(items) - _NAMED} more"] if len(items) > _NAMED else []
    return separator.join([*items[:_NAMED], *more])
