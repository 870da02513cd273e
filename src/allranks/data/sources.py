"""Built-in sources: real text on every machine, as windows of bytes."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from allranks.errors import ConfigError, DataError

Split = Literal["train", "validation"]
Window = dict[str, torch.Tensor]

# From this many files on, whole files are held out: below, a tenth of the files is too few to stand for the text.
_MANY_FILES: Final = 20
_NOT_TEXT: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def standard_library_text() -> tuple[Path, ...]:
    """The .py files of the running Python's standard library, sorted; without its tests and installed packages.

    Raises DataError where they are not on disk (a zipped or stripped Python).
    """
    root = sysconfig.get_path("stdlib")
    files: list[Path] = []
    for directory, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_TEXT]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"the standard library has no .py files under {root}: bring your own text with data.text=GLOB")
    return tuple(sorted(files))


def text_files(pattern: str) -> tuple[Path, ...]:
    """The files that a glob pattern matches (`**` goes into directories), sorted. Raises DataError where there is
    none.
    """
    files = tuple(sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()))
    if not files:
        raise DataError(f"data.text={pattern!r} matches no file (seen from {Path.cwd()})")
    return files


class ByteWindows(Dataset[Window]):
    """Windows of `seq` bytes out of text files: {"x": int64 [seq], "y": int64 [seq]}, y being x one byte later.

    Windows follow one another without overlap in x. Train and validation share no byte: with 20 files or more, whole
    files are held out, chosen by a hash of their path below their common directory; with fewer the last part of the
    text is; `rule` says which.

    Args:
        files: text files of any encoding; their order does not matter.
        split: "train", or "validation" for what is held out.
        seq: bytes in a window.
        max_bytes: of the whole text, both splits together; the files that are read are then chosen by a hash too. None:
            all of it.
        held_out: fraction of the text, or of the files, that is validation.

    Raises:
        DataError: a file cannot be read, or the split has no whole window. ConfigError: an argument out of its range.
    """

    draws = False  # nothing here is random: items need no seeds

    def __init__(
        self,
        files: Sequence[Path],
        *,
        split: Split = "train",
        seq: int = 256,
        max_bytes: int | None = None,
        held_out: float = 0.1,
    ) -> None:
        if seq < 1 or not 0 < held_out < 1 or (max_bytes is not None and max_bytes < 1):
            raise ConfigError(
                f"seq={seq} and max_bytes={max_bytes} have to be at least 1, and held_out={held_out} between 0 and 1"
            )
        if split not in ("train", "validation"):
            raise ConfigError(f"split={split!r}, but there are train and validation")
        self.split, self.seq = split, seq
        try:
            pieces, self.rule = _pieces(files, split, max_bytes, held_out)
            self.text: npt.NDArray[np.uint8] = np.frombuffer(b"".join(map(_read, pieces)), dtype=np.uint8)
        except OSError as error:
            raise DataError(f"cannot read {error.filename}: {error.strerror}") from None
        count = (len(self.text) - 1) // seq
        if count < 1:
            raise DataError(
                f"the {split} text has {len(self.text)} bytes, fewer than one window of seq({seq}) + 1: "
                "bring more text, or set a shorter seq"
            )
        self._windows = np.lib.stride_tricks.as_strided(self.text, (count, seq + 1), (seq, 1), writeable=False)

    def __repr__(self) -> str:
        return f"<ByteWindows {self.split}: {len(self)} windows of {self.seq} bytes>"

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Window:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Window]:
        """Several items at once, out of one gather."""
        rows = torch.from_numpy(self._windows[indices].astype(np.int64))
        xs, ys = rows[:, :-1].unbind(), rows[:, 1:].unbind()
        return [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of this split's bytes: a resumed run compares it, so that a text that changed is noticed."""
        return hashlib.sha256(self.text.data).hexdigest()


Piece = tuple[Path, int, int]  # a file, and from which byte to which


def _pieces(files: Sequence[Path], split: Split, max_bytes: int | None, held_out: float) -> tuple[list[Piece], str]:
    """What to read for `split`, in the order of the paths, and the rule in words."""
    paths = sorted(set(files))
    if not paths:
        raise DataError("no text file was given")
    base = os.path.commonpath([path.absolute().parent for path in paths])
    draws = {path: _draw(path.absolute().relative_to(base)) for path in paths}
    pieces, left = [], max_bytes
    for path in paths if left is None else sorted(paths, key=lambda path: draws[path][1]):
        size = path.stat().st_size
        size = size if left is None else min(size, left)
        left = None if left is None else left - size
        if size:
            pieces.append((path, 0, size))
        if left == 0:
            break
    pieces.sort()
    held = [piece for piece in pieces if draws[piece[0]][0] < held_out]
    if len(pieces) >= _MANY_FILES and 0 < len(held) < len(pieces):
        chosen = held if split == "validation" else [piece for piece in pieces if draws[piece[0]][0] >= held_out]
        return chosen, f"validation is {len(held)} of {len(pieces)} files, chosen by a hash of their path"
    rule = f"validation is the last {held_out:.0%} of the text, because there are only {len(pieces)} files"
    return _tail(pieces, split, held_out), rule


def _draw(path: Path) -> tuple[float, float]:
    """Two numbers in [0, 1) that depend on nothing but the path: one to hold files out by, one to choose by."""
    digest = hashlib.blake2b(path.as_posix().encode(), digest_size=12).digest()
    return int.from_bytes(digest[:6], "big") / 2**48, int.from_bytes(digest[6:], "big") / 2**48


def _tail(pieces: list[Piece], split: Split, held_out: float) -> list[Piece]:
    total = sum(stop for _, _, stop in pieces)
    border = total - int(total * held_out)
    chosen, offset = [], 0
    for path, _, size in pieces:
        middle = min(max(border - offset, 0), size)
        start, stop = (middle, size) if split == "validation" else (0, middle)
        if start < stop:
            chosen.append((path, start, stop))
        offset += size
    return chosen


def _read(piece: Piece) -> bytes:
    path, start, stop = piece
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        data = file.read(stop - start)
    if len(data) != stop - start:
        raise DataError(f"{path} changed while it was read")
    return data
