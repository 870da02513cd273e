"""Any world's checkpoint into any other's tensors, bit by bit; and nothing into tensors that do not fit."""

import dataclasses
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing.checking import check_files
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.restore import is_of_one_rank, name_of_rank, read_whole, restore
from allranks.checkpointing.tensor_file import DTYPES, OpenFile
from allranks.errors import CheckpointError
from allranks.parameter_map import Box, Entry
from tests.checkpointing.worlds import (
    Pairs,
    blank,
    flip,
    parts,
    same_bits,
    save_alone,
    save_together,
    whole_tensors,
)
from tests.distributed.pool import ROOT, Pools

WORLDS = (1, 2, 3, 4)


def check_restored(path: Path) -> None:
    """Restore on this rank of the pool's world, and compare every bit."""
    expected = parts(whole_tensors(), dist.get_rank(), dist.get_world_size())
    filled = blank(expected)
    restore(Checkpoint.open(path), filled)
    for (entry, tensor), (_, right) in zip(filled, expected, strict=True):
        assert same_bits(tensor, right), entry


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_what_a_world_saves_every_other_restores_bit_by_bit(pool: Pools, tmp_path: Path, world_size: int) -> None:
    pool(world_size).run(lambda: save_together(tmp_path).step)
    for other in WORLDS:
        pool(other).run(check_restored, tmp_path / "step-00000200")


def test_every_way_of_cutting_is_restored_from_every_other(tmp_path: Path) -> None:
    """In one process, with tensors in three dims and boxes that cross one another."""
    draw = random.Random(0)
    tensor = torch.randn(6, 9, 5)
    for round_ in range(10):
        edges = [sorted((0, extent, draw.randint(0, extent), draw.randint(0, extent))) for extent in tensor.shape]
        cut = [Box((a, 0, c), (b - a, 9, d - c)) for a, b in pairwise(edges[0]) for c, d in pairwise(edges[2])]
        pairs = [(Entry("w", (6, 9, 5), "float32", box, (0,)), _local(tensor, box)) for box in cut]
        checkpoint = save_alone(tmp_path, round_, pairs, aliases={})
        low = tuple(draw.randrange(extent) for extent in tensor.shape)
        box = Box(low, tuple(draw.randint(1, n - a) for n, a in zip(tensor.shape, low, strict=True)))
        target = torch.zeros(box.shape)
        restore(checkpoint, [(Entry("w", (6, 9, 5), "float32", box, (0,)), target)])
        assert same_bits(target, _local(tensor, box))


def _local(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))].clone()


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (3, 5), (0, 2), (1, 1, 1)])
def test_every_dtype_and_shape_comes_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    count = torch.Size(shape).numel()
    tensor = torch.randint(0, high, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)
    entry = Entry("w", shape, str(dtype).removeprefix("torch."), Box.whole(shape), (0,))
    checkpoint = save_alone(tmp_path, pairs=[(entry, tensor)], aliases={})
    target = torch.zeros(shape, dtype=torch.uint8).to(dtype) if count else torch.empty(shape, dtype=dtype)
    restore(checkpoint, [(entry, target)])
    assert same_bits(target, tensor)
    assert same_bits(read_whole(checkpoint, "")["w"], tensor)


def test_nan_payloads_and_signed_zeros_come_back(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0], dtype=torch.int32)
    entry = Entry("w", (5,), "float32", Box.whole((5,)), (0,))
    checkpoint = save_alone(tmp_path, pairs=[(entry, bits.view(torch.float32))], aliases={})
    assert read_whole(checkpoint, "")["w"].view(torch.int32).tolist() == bits.tolist()


def test_tensors_that_are_not_contiguous_are_saved_and_filled(tmp_path: Path) -> None:
    tensor = torch.randn(6, 4).t()
    entry = Entry("w", (4, 6), "float32", Box.whole((4, 6)), (0,))
    checkpoint = save_alone(tmp_path, pairs=[(entry, tensor)], aliases={})
    target = torch.zeros(6, 8)[:, ::2].t()
    restore(checkpoint, [(entry, target)])
    assert torch.equal(target, tensor)


def test_parameters_are_filled_in_place_and_keep_their_gradients_flag(tmp_path: Path) -> None:
    pairs = parts(whole_tensors(), 0, 1)
    checkpoint = save_alone(tmp_path, pairs=pairs)
    parameter = torch.nn.Parameter(torch.zeros(13, 7))
    filled: Pairs = [(e, parameter if e.name == "model.embedding.weight" else t) for e, t in blank(pairs)]
    address = parameter.data_ptr()
    restore(checkpoint, filled)
    assert (parameter.data_ptr(), parameter.requires_grad, parameter.is_leaf) == (address, True, True)
    assert same_bits(parameter.detach(), whole_tensors()["model.embedding.weight"])


def test_a_part_larger_than_a_chunk_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.checkpointing.writing.CHUNK_BYTES", 64)
    pairs = parts(whole_tensors(), 0, 1)
    checkpoint = save_alone(tmp_path, pairs=pairs)
    assert max(length for record in checkpoint.manifest.files.values() for _, length, _ in record.chunks) == 64
    filled = blank(pairs)
    restore(checkpoint, filled)
    assert all(same_bits(tensor, right) for (_, tensor), (_, right) in zip(filled, pairs, strict=True))
    rows = Box((5, 2), (3, 4))
    target = torch.zeros(rows.shape)
    entry = Entry("model.embedding.weight", (13, 7), "float32", rows, (0,))
    restore(checkpoint, [(entry, target)], names=checkpoint.manifest.tensors)
    assert same_bits(target, _local(whole_tensors()["model.embedding.weight"], rows))


def test_each_chunk_is_read_once_and_only_where_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.checkpointing.writing.CHUNK_BYTES", 64)
    checkpoint = save_alone(tmp_path)
    read: list[int] = []
    original = OpenFile._read

    def counted(self: OpenFile, number: int, buffer: bytearray) -> memoryview:
        read.append(number)
        return original(self, number, buffer)

    monkeypatch.setattr(OpenFile, "_read", counted)
    restore(checkpoint, blank(parts(whole_tensors(), 0, 1)))
    num_chunks = len(checkpoint.manifest.files["rank-00000.safetensors"].chunks)
    header_chunks = [number for number in read if read.count(number) > 1]
    assert sorted(set(read)) == list(range(num_chunks))
    assert len(read) == num_chunks and not header_chunks
    read.clear()
    entry = Entry("model.scale", (), "float64", Box.whole(()), (0,))
    restore(checkpoint, [(entry, torch.zeros((), dtype=torch.float64))], names=checkpoint.manifest.tensors)
    assert len(read) < num_chunks


def _differences(checkpoint: Checkpoint, pairs: Pairs, names: list[str] | None = None) -> str:
    before = [tensor.clone() for _, tensor in pairs]
    with pytest.raises(CheckpointError) as caught:
        restore(checkpoint, pairs, names)
    assert "\n" not in str(caught.value)
    assert all(same_bits(old, tensor) for old, (_, tensor) in zip(before, pairs, strict=True)), "something was copied"
    return str(caught.value)


def test_a_tensor_missing_left_over_reshaped_or_of_another_dtype_is_named(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    good = blank(parts(whole_tensors(), 0, 1))
    assert "'model.scale' is only in the checkpoint" in _differences(
        checkpoint, [p for p in good if p[0].name != "model.scale"]
    )
    extra = (Entry("model.more", (2,), "float32", Box.whole((2,)), (0,)), torch.zeros(2))
    assert "'model.more' is not in the checkpoint" in _differences(checkpoint, [*good, extra])
    tied = (dataclasses.replace(good[0][0], name="model.head.weight"), good[0][1].clone())
    assert (
        "'model.head.weight' is not in the checkpoint (there it is tied to 'model.embedding.weight')"
        in _differences(checkpoint, [*good, tied])
    )
    reshaped = (Entry("model.norm.weight", (8,), "int64", Box.whole((8,)), (0,)), torch.zeros(8, dtype=torch.int64))
    others = [p for p in good if p[0].name != "model.norm.weight"]
    assert "'model.norm.weight' is int64[7] in the checkpoint and int64[8] here" in _differences(
        checkpoint, [*others, reshaped]
    )
    wider = (dataclasses.replace(good[0][0], dtype="float64"), good[0][1].double())
    assert "is float32[13, 7] in the checkpoint and float64[13, 7] here" in _differences(checkpoint, [wider, *good[1:]])


def test_only_the_first_ten_differences_are_named(tmp_path: Path) -> None:
    pairs: Pairs = [(Entry(f"w{i:02d}", (1,), "float32", Box.whole((1,)), (0,)), torch.zeros(1)) for i in range(25)]
    message = _differences(save_alone(tmp_path, pairs=pairs, aliases={}), [])
    assert "'w09'" in message and "'w10'" not in message and "and 15 more" in message


def test_a_rank_that_holds_a_few_tensors_says_which_others_there_are(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    some = blank(parts(whole_tensors(), 0, 1))[:2]
    restore(checkpoint, some, names=list(checkpoint.manifest.tensors))
    assert same_bits(some[0][1], whole_tensors()["model.embedding.weight"])
    assert "'model.more' is not in" in _differences(
        checkpoint, blank(some), [*checkpoint.manifest.tensors, "model.more"]
    )


def test_aliases_and_what_is_not_persistent_are_passed_over(tmp_path: Path) -> None:
    pairs = parts(whole_tensors(), 0, 1)
    alias = (dataclasses.replace(pairs[0][0], name="model.head.weight", alias_of="model.embedding.weight"), pairs[0][1])
    passing = (dataclasses.replace(pairs[2][0], name="model.cache", persistent=False), pairs[2][1])
    checkpoint = save_alone(tmp_path, pairs=[*pairs, alias, passing])
    assert checkpoint.manifest.tensors.keys() == whole_tensors().keys()
    assert checkpoint.manifest.aliases == {"model.head.weight": "model.embedding.weight"}
    restore(checkpoint, [*blank(pairs), alias, passing])


def test_the_whole_of_a_module_with_its_ties(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    whole = read_whole(checkpoint)
    expected = {n.removeprefix("model."): t for n, t in whole_tensors().items() if n.startswith("model.")}
    assert whole.keys() == expected.keys() | {"head.weight"}
    assert whole["head.weight"] is whole["embedding.weight"]
    assert all(same_bits(whole[name], tensor) for name, tensor in expected.items())
    assert list(read_whole(checkpoint, names=["model.head.weight"])) == ["head.weight"]
    with pytest.raises(CheckpointError, match=r"has no 'model\.other'$"):
        read_whole(checkpoint, names=["model.other"])


def test_a_flipped_bit_anywhere_in_two_hundred_places_is_found(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    draw = random.Random(0)
    files = [path for path in checkpoint.path.iterdir()]
    assert len(files) == 3
    pairs = parts(whole_tensors(), 0, 1)
    for place in range(200):
        path = files[place % 3]
        bit = draw.randrange(path.stat().st_size * 8)
        flip(path, bit)
        with pytest.raises(CheckpointError):
            restore(Checkpoint.open(checkpoint.path), blank(pairs))
        flip(path, bit)
    restore(Checkpoint.open(checkpoint.path), blank(pairs))


def test_a_checkpoint_of_schema_1_is_read_for_ever() -> None:
    """Two boxes of a tensor of every dtype, written when schema 1 was made: format, keys of the digest, state."""
    checkpoint = Checkpoint.open(ROOT / "tests" / "golden" / "checkpoint-schema-1", run_id="run-a")
    check_files(checkpoint)
    assert checkpoint.manifest.state == {
        "position": 1600,
        "best": math.inf,
        "nested": {"a": [1, 2.5, None, True, "ü"]},
    }
    whole = read_whole(checkpoint)
    assert whole.keys() == DTYPES.keys() | {"tied"} and whole["tied"] is whole["float32"]
    for name in DTYPES:
        dtype = getattr(torch, name)
        count = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        expected = (count % 2).bool() if name == "bool" else count.view(dtype)
        assert same_bits(whole[name], expected.reshape(2, 3)), name


def test_what_single_ranks_have_learnt_is_read_where_it_is_named(tmp_path: Path) -> None:
    own = [name_of_rank("model.mean", rank) for rank in (0, 12)]
    assert own == ["model.mean@dp0", "model.mean@dp12"] and all(map(is_of_one_rank, own))
    assert not any(map(is_of_one_rank, ("model.mean", "model.mean@dp", "@dp1", "model.mean@dp1.x")))
    tensors = {name: torch.full((2,), float(at)) for at, name in enumerate(("model.mean", *own))}
    pairs = [(Entry(name, (2,), "float32", Box.whole((2,)), (0,)), tensor) for name, tensor in tensors.items()]
    checkpoint = save_alone(tmp_path, 0, pairs, aliases={})
    assert {name: value.tolist() for name, value in read_whole(checkpoint).items()} == {"mean": [0.0, 0.0]}
    assert read_whole(checkpoint, names=own)["mean@dp12"].tolist() == [2.0, 2.0]
    blanked = blank(pairs[:1])
    with pytest.raises(CheckpointError, match="is only in the checkpoint"):
        restore(checkpoint, blanked)
    restore(checkpoint, blanked, names=[*tensors])
    assert blanked[0][1].tolist() == [0.0, 0.0]
