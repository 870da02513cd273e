"""Sums that prove: the ledger of the samples that were fed, and the digest of a tensor that lies in shards.

Both are sums modulo 2**64, so parts that different ranks hold are digested where they lie and added in any order.

A tensor's digest is its contraction with one vector of odd 64-bit keys for each dim, taken over the elements' bits:

    sum over index (i0, i1, ...) of  key(0, i0) * key(1, i1) * ... * (bits[i0, i1, ...] + 1)      modulo 2**64

The keys are a fixed function of dim and index, so every box of the tensor adds the same terms whoever holds it. Bits
are taken as signed words of at most 32; wider elements are several words along the last dim. The +1 makes a missing or
repeated box of zeros visible. One changed word is always found (an odd key times a difference below 2**32 is never 0
modulo 2**64); several changed words cancel each other with a probability of about 2**-32 (multilinear hashing:
Lemire and Kaser, "Strongly universal string hashing is fast", 2014). It finds mistakes and broken hardware; it is no
defence against forgery: files have SHA-256 for that. It is bilinear on purpose: a multiplication and a sum run at
memory speed, a mix of every element does not.

This module imports no torch: `part_digest` uses only operators that numpy and torch share.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTOR_1, _SHIFT_1 = 0xBF58476D1CE4E5B9, 30
_FACTOR_2, _SHIFT_2 = 0x94D049BB133111EB, 27
_SHIFT_3 = 31

_FEW = 16  # up to here plain python beats numpy's fixed cost of about 20 us
HOST_BLOCK = 1 << 15  # elements: 256 KiB of int64, inside a level-2 cache
DEVICE_BLOCK = 1 << 24  # a GPU wants few and large kernels
_SLAB_BLOCKS = 32
_DIGIT_BITS = 12


def mix(value: int) -> int:
    """A bijection of 64-bit integers: every bit of `value` stirs every bit of the result (splitmix64's finaliser)."""
    value &= _MASK
    value = (value ^ (value >> _SHIFT_1)) * _FACTOR_1 & _MASK
    value = (value ^ (value >> _SHIFT_2)) * _FACTOR_2 & _MASK
    return value ^ (value >> _SHIFT_3)


def sample_hash(position: int, sample: int) -> int:
    """The ledger's term, in [0, 2**64), for dataset item `sample` fed at global `position`."""
    return mix(mix(position + _GOLDEN) + sample)


def ledger_sum(positions: Sequence[int], samples: Sequence[int]) -> int:
    """The sum of `sample_hash` over samples fed, modulo 2**64; lists or numpy arrays of int64.

    Raises:
        ValueError: the two differ in length.
    """
    if len(positions) != len(samples):
        raise ValueError(f"{len(positions)} positions for {len(samples)} samples")
    if len(positions) <= _FEW:
        return sum(sample_hash(int(p), int(s)) for p, s in zip(positions, samples, strict=True)) & _MASK
    import numpy as np

    inner = _mix_unsigned(np.asarray(positions, dtype=np.int64).view(np.uint64) + np.uint64(_GOLDEN))
    terms = _mix_unsigned(inner + np.asarray(samples, dtype=np.int64).view(np.uint64))
    return int(terms.sum(dtype=np.uint64))


def _mix_unsigned(value: Any) -> Any:
    """`mix` of a numpy array of uint64."""
    import numpy as np

    value = (value ^ (value >> np.uint64(_SHIFT_1))) * np.uint64(_FACTOR_1)
    value = (value ^ (value >> np.uint64(_SHIFT_2))) * np.uint64(_FACTOR_2)
    return value ^ (value >> np.uint64(_SHIFT_3))


def part_digest(words: Any, offset: Sequence[int], arange: Callable[[int, int], Any], block: int = HOST_BLOCK) -> int:
    """The share, in [0, 2**64), that one box adds to its tensor's digest.

    Args:
        words: the box's elements as signed integers of at most 32 bits, an array of numpy or torch with at least one
            dim; wider elements come as several words in a last dim that is longer by that factor.
        offset: of the box in the logical tensor, one number for each dim of `words`.
        arange: `arange(start, stop)` makes an int64 array of `words`' library on its device.
        block: elements that are worked on at once: HOST_BLOCK stays inside the cache, DEVICE_BLOCK keeps a GPU's
            kernels long.
    """
    shape = tuple(words.shape)
    if 0 in shape:
        return 0
    inner = [_keys(dim, offset[dim], shape[dim], arange) for dim in range(1, len(shape))]
    # Slabs along the first dim bound the memory for its keys, and for the copy of a tensor that is not contiguous.
    height = max(1, _SLAB_BLOCKS * block // math.prod(shape[1:]))
    total = 0
    for start in range(0, shape[0], height):
        slab = words[start : start + height]
        total += _contract(slab, [_keys(0, offset[0] + start, slab.shape[0], arange), *inner], block)
    return total & _MASK


def digest_hex(total: int, dtype: str, shape: Sequence[int]) -> str:
    """The digest as written: 16 hexadecimal digits of the summed parts, the dtype ("float32") and the whole shape."""
    text = f"{dtype} {','.join(map(str, shape))} {total & _MASK}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _contract(slab: Any, keys: list[Any], block: int) -> int:
    """The sum over `slab` of its words plus one, each times the product of its keys; not reduced modulo 2**64."""
    columns = keys.pop()
    while keys and len(keys[-1]) * len(columns) <= block:
        columns = _outer(keys.pop(), columns)
    rows = keys.pop() if keys else columns[:1] * 0 + 1
    while keys:
        rows = _outer(keys.pop(), rows)
    table = slab.reshape(len(rows), len(columns))
    sums = rows * 0
    height = max(1, block // len(columns))
    for top in range(0, len(rows), height):
        for left in range(0, len(columns), block):
            words = table[top : top + height, left : left + block]
            sums[top : top + height] += (words * columns[left : left + block]).sum(-1)
    return int(((sums + columns.sum()) * rows).sum())


def _outer(slow: Any, fast: Any) -> Any:
    return (slow[:, None] * fast[None, :]).reshape(-1)


def _keys(dim: int, start: int, length: int, arange: Callable[[int, int], Any]) -> Any:
    """The odd keys of indices `start` to `start + length`: an index's two digits in base 4096 have one each."""
    first, last = start >> _DIGIT_BITS, (start + length - 1) >> _DIGIT_BITS
    low = start - (first << _DIGIT_BITS)
    high_keys = _mixed(arange(first, last + 1), 2 * dim)
    if first == last:
        return _mixed(arange(low, low + length), 2 * dim + 1) * high_keys
    return _outer(high_keys, _mixed(arange(0, 1 << _DIGIT_BITS), 2 * dim + 1))[low : low + length]


def _mixed(digits: Any, seed: int) -> Any:
    """`mix` of an int64 array under one of many seeds, made odd."""
    value = digits + _signed(mix(seed + 1))
    value = (value ^ _shifted(value, _SHIFT_1)) * _signed(_FACTOR_1)
    value = (value ^ _shifted(value, _SHIFT_2)) * _signed(_FACTOR_2)
    return (value ^ _shifted(value, _SHIFT_3)) | 1


def _shifted(value: Any, bits: int) -> Any:
    """A logical shift to the right: torch has only the arithmetic one, so its copies of the sign bit are masked."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as a number that int64 holds."""
    return value - (1 << 64) if value >> 63 else value
