"""Tensors of every kind, and how a world of ranks may hold them: whole, or cut unevenly in a dim, some boxes empty."""

import math
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from allranks.checkpointing.background import BackgroundSave, World
from allranks.checkpointing.checkpoint import Checkpoint, Header
from allranks.checkpointing.portion import place_of, portion_of
from allranks.checkpointing.save import save
from allranks.checkpointing.stage import Stage
from allranks.checkpointing.tensor_file import OpenFile
from allranks.parameter_map import Box, Entry

Pairs = list[tuple[Entry, torch.Tensor]]

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embedding.weight": (13, 7),
    "model.layers.0.weight": (5, 3, 4),
    "model.norm.weight": (7,),
    "model.scale": (),
    "model.nothing": (0, 4),
    "optimizer.exp_avg.embedding.weight": (13, 7),
    "optimizer.step.embedding.weight": (1,),
}
DTYPES = {"model.layers.0.weight": torch.bfloat16, "model.scale": torch.float64, "model.norm.weight": torch.int64}


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The logical tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 100).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def boxes(name: str, shape: tuple[int, ...], world_size: int) -> list[Box]:
    """Every rank's box of a tensor; drawn by name and world size, so that all ranks agree."""
    draw = random.Random(zlib.crc32(f"{name} {world_size}".encode()))
    if not shape or draw.random() < 0.2:
        return [Box.whole(shape)] * world_size
    dim = draw.randrange(len(shape))
    groups = draw.choice([1, 2]) if world_size % 2 == 0 else 1  # with 2, pairs of ranks hold the same box
    cuts = world_size // groups
    edges = [0, *sorted(draw.randint(0, shape[dim]) for _ in range(cuts - 1)), shape[dim]]
    found = []
    for rank in range(world_size):
        low, high = edges[rank % cuts], edges[rank % cuts + 1]
        offset = tuple(low if d == dim else 0 for d in range(len(shape)))
        extent = tuple(high - low if d == dim else full for d, full in enumerate(shape))
        found.append(Box(offset, extent))
    return found


def entry(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> Entry:
    """A rank's entry of a logical tensor."""
    shape = tuple(tensor.shape)
    held = boxes(name, shape, world_size)
    holders = tuple(other for other, box in enumerate(held) if box == held[rank])
    return Entry(name, shape, str(tensor.dtype).removeprefix("torch."), held[rank], holders)


def local(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A copy of the box of a logical tensor."""
    place = tuple(slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
    return tensor[place].clone()


def parts(tensors: dict[str, torch.Tensor], rank: int, world_size: int) -> Pairs:
    """What a rank of that world holds."""
    entries = [entry(name, tensor, rank, world_size) for name, tensor in tensors.items()]
    return [(found, local(tensors[found.name], found.box)) for found in entries]


def blank(pairs: Pairs) -> Pairs:
    """The same entries with other values."""
    return [(found, torch.full_like(tensor, 77)) for found, tensor in pairs]


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal dtype, shape and bits: -0.0 and NaNs count as what they are."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return bool(torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second))))


def header(step: int = 200, run: str = "run-a", generation: int = 1) -> Header:
    """A header."""
    return Header(run, generation, "ddp", step, step * 8)


def save_alone(directory: Path, step: int = 200, pairs: Pairs | None = None, **options: Any) -> Checkpoint:
    """Save in this process alone."""
    arguments: dict[str, Any] = {
        "header": header(step),
        "parts": parts(whole_tensors(), 0, 1) if pairs is None else pairs,
        "aliases": {"model.head.weight": "model.embedding.weight"},
        "state": {"position": 1600, "best": 0.1, "worst": -math.inf},
        "group": None,
        "rank": 0,
        "world_size": 1,
        "token": "t1",
    }
    return save(directory, **(arguments | options))


def save_together(directory: Path, step: int = 200, **options: Any) -> Checkpoint:
    """Save in the pool's world; runs on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arguments: dict[str, Any] = {
        "pairs": parts(whole_tensors(), rank, world_size),
        "group": dist.group.WORLD,
        "rank": rank,
        "world_size": world_size,
    }
    return save_alone(directory, step, **(arguments | options))


def begin(
    directory: Path,
    step: int = 200,
    pairs: Pairs | None = None,
    *,
    stage: Stage | None = None,
    generation: int = 1,
    proves: bool = False,
    together: bool = False,
    token: str = "t1",
    **options: Any,
) -> BackgroundSave:
    """Begin a save beside this process, alone or in the pool's world."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    held = parts(whole_tensors(), rank, size) if pairs is None else pairs
    aliases, state = {"model.head.weight": "model.embedding.weight"}, {"position": 1600, "best": 0.1}
    portion = portion_of(held, rank, aliases, state, tells=rank == 0)
    copied, ready = (stage or Stage()).copy(portion, proves=proves)
    world = World(dist.group.WORLD if together else None, rank, size, torch.device("cpu"))
    place = place_of(directory, header(step, generation=generation), token)
    return BackgroundSave(place, copied, world, ready=ready, proves=proves, **options)


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@contextmanager
def counted_reads() -> Iterator[tuple[list[Path], list[tuple[Path, int]]]]:
    """The files that this process opens of any checkpoint inside, and the chunks that it reads: (path, number)."""
    opened, read = list[Path](), list[tuple[Path, int]]()
    open_it, read_it = OpenFile.__init__, OpenFile._read

    def opens(self: OpenFile, directory: Path, name: str, record: Any) -> None:
        opened.append(Path(directory, name))
        open_it(self, directory, name, record)

    def reads(self: OpenFile, number: int, buffer: bytearray) -> memoryview:
        read.append((self.path, number))
        return read_it(self, number, buffer)

    with mock.patch.object(OpenFile, "__init__", opens), mock.patch.object(OpenFile, "_read", reads):
        yield opened, read
