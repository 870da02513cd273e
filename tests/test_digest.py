"""The ledger's sum and the digest of a tensor in parts."""

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import pytest

from allranks.digest import digest_hex, ledger_sum, mix, part_digest, sample_hash

MODULUS = 1 << 64


def plain_key(dim: int, index: int) -> int:
    """The key of one index, in plain integers."""
    high, low = divmod(index, 4096)
    return (mix(high + mix(2 * dim + 1)) | 1) * (mix(low + mix(2 * dim + 2)) | 1)


def plain_digest(words: npt.NDArray[np.int32], offset: tuple[int, ...]) -> int:
    """The definition in the module's docstring, one element at a time."""
    total = 0
    for index in np.ndindex(*words.shape):
        keys = math.prod(plain_key(dim, start + i) for dim, (start, i) in enumerate(zip(offset, index, strict=True)))
        total += keys * (int(words[index]) + 1)
    return total % MODULUS


def cuts(length: int, parts: int, draw: random.Random) -> list[tuple[int, int]]:
    """Uneven pieces of `length`, some of them empty."""
    edges = sorted([0, length, *(draw.randint(0, length) for _ in range(parts - 1))])
    return list(pairwise(edges))


def boxes(shape: tuple[int, ...], draw: random.Random) -> Iterator[tuple[slice, ...]]:
    """A partition of `shape` into boxes, cut unevenly in every dim."""
    for box in product(*(cuts(extent, 3, draw) for extent in shape)):
        yield tuple(slice(start, stop) for start, stop in box)


def random_words(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, size=shape, dtype=np.int32)


def test_the_ledger_is_the_sum_of_the_hashes_however_it_is_computed_and_cut() -> None:
    draw = random.Random(0)
    positions = [draw.randrange(2**40) for _ in range(100)]
    samples = [draw.randrange(2**33) for _ in range(100)]
    whole = sum(sample_hash(p, s) for p, s in zip(positions, samples, strict=True)) % MODULUS
    assert ledger_sum(positions, samples) == whole
    assert ledger_sum(np.array(positions), np.array(samples)) == whole  # type: ignore[arg-type]
    for cut in (0, 1, 7, 16, 17, 50, 100):
        parts = ledger_sum(positions[:cut], samples[:cut]) + ledger_sum(positions[cut:], samples[cut:])
        assert parts % MODULUS == whole
        few = ledger_sum(np.array(positions[:cut], np.int64), np.array(samples[:cut], np.int64))  # type: ignore[arg-type]
        assert few == ledger_sum(positions[:cut], samples[:cut])


def test_the_ledger_sees_a_sample_left_out_repeated_replaced_or_moved() -> None:
    positions, samples = list(range(40)), [index * 7 % 40 for index in range(40)]
    good = ledger_sum(positions, samples)
    assert ledger_sum(positions[:-1], samples[:-1]) != good
    assert ledger_sum([*positions, 3], [*samples, samples[3]]) != good
    assert ledger_sum(positions, [*samples[:-1], samples[-1] + 1]) != good
    assert ledger_sum(positions, [samples[1], samples[0], *samples[2:]]) != good
    assert len({sample_hash(p, s) for p in range(100) for s in range(100)}) == 10_000


def test_the_ledgers_two_columns_must_be_of_one_length() -> None:
    with pytest.raises(ValueError, match="3 positions for 2 samples"):
        ledger_sum([1, 2, 3], [1, 2])


def test_the_hashes_never_change() -> None:
    """Journals and manifests on disk hold them."""
    assert mix(1) == 0x5692161D100B05E5
    assert sample_hash(0, 0) == mix(mix(0x9E3779B97F4A7C15))
    assert ledger_sum([5, 6], [7, 8]) == 0x75C3616A036B8DE1
    words = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert digest_hex(part_digest(words, (0, 0), np.arange), "int32", (2, 3)) == "a7db2f610facae63"


@pytest.mark.parametrize("shape", [(1,), (13,), (5, 7), (3, 1, 4), (2, 3, 4, 5), (1, 1, 6)])
@pytest.mark.parametrize("block", [1, 4, 6, 1 << 15])
def test_the_digest_follows_its_definition_in_every_blocking(shape: tuple[int, ...], block: int) -> None:
    words = random_words(shape)
    offset = tuple(range(4094, 4094 + len(shape)))  # across a digit of the keys
    assert part_digest(words, offset, np.arange, block) == plain_digest(words, offset)


@pytest.mark.parametrize("shape", [(17,), (7, 13), (5, 1, 9), (4, 5, 6), (3, 3, 3, 3)])
def test_boxes_cut_unevenly_in_every_dim_add_up_to_the_whole(shape: tuple[int, ...]) -> None:
    draw = random.Random(1)
    words = random_words(shape)
    whole = part_digest(words, (0,) * len(shape), np.arange)
    for _ in range(10):
        parts = sum(part_digest(words[box], [s.start for s in box], np.arange) for box in boxes(shape, draw))
        assert parts % MODULUS == whole


def test_a_missing_or_repeated_box_of_zeros_is_seen() -> None:
    zeros = np.zeros((4, 6), np.int32)
    whole = part_digest(zeros, (0, 0), np.arange)
    half = part_digest(zeros[:2], (0, 0), np.arange)
    assert len({whole, half, 2 * half % MODULUS, 0}) == 4


def test_one_changed_bit_and_two_changed_signs_and_swapped_rows_are_seen() -> None:
    words = random_words((40, 50))
    good = part_digest(words, (0, 0), np.arange)
    draw = random.Random(2)
    for _ in range(200):
        changed = words.copy()
        changed[draw.randrange(40), draw.randrange(50)] ^= np.int32(
            -(2**31) if draw.random() < 0.5 else 1 << draw.randrange(31)
        )
        assert part_digest(changed, (0, 0), np.arange) != good
    signs = words ^ np.int32(-(2**31))
    assert part_digest(signs, (0, 0), np.arange) != good
    rectangle = words.copy()
    rectangle[np.ix_([3, 9], [4, 20])] ^= np.int32(-(2**31))
    assert part_digest(rectangle, (0, 0), np.arange) != good
    swapped = words[[1, 0, *range(2, 40)]]
    assert part_digest(swapped, (0, 0), np.arange) != good


def test_the_written_digest_tells_shapes_and_dtypes_apart() -> None:
    written = {
        digest_hex(1, dtype, shape) for dtype in ("float32", "int32") for shape in ((), (1,), (6,), (2, 3), (3, 2))
    }
    assert len(written) == 10
    assert digest_hex(1, "float32", (2,)) == digest_hex(1 + MODULUS, "float32", (2,))


def test_the_module_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, allranks.digest; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
