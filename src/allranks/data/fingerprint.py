"""Whether the data is what it was: digests of the first few samples of the order, by their numbers in the dataset.

The order is a permutation, so that they lie anywhere in the dataset; and a run that begins loads them anyway.
"""

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from allranks.data.random_keys import generators_kept, item_key, seed_all
from allranks.data.stream import DataStream

NUM_SAMPLES: Final = 16
SECONDS: Final = 5.0
UNREADABLE: Final = "unreadable: "
_LETTERS: Final = 16

Fingerprint = Mapping[str, str]
"""Number of a sample in the dataset -> its digest, or UNREADABLE and why."""


class _UnknownKindError(Exception):
    """A sample holds what has no bytes that mean the same tomorrow."""


def take_fingerprint(stream: DataStream) -> dict[str, str]:
    """That of the data as it is now; {} of data in which no number names a sample, or whose samples have no digest.

    It takes SECONDS and one sample at most. What is never fed is not loaded.
    """
    found: dict[str, str] = {}
    if stream.order != "map" or stream.num_samples is None:
        return found
    began = time.monotonic()
    for position in range(min(NUM_SAMPLES, stream.num_samples)):
        if stream.left_out.beyond(position) != position:
            continue
        number = int(stream.samples_at(np.array([position]))[0])
        digest = digest_at(stream, number)
        if digest is not None:
            found[str(number)] = digest
        if time.monotonic() - began > SECONDS:
            break
    return found


def digest_at(stream: DataStream, number: int) -> str | None:
    """The digest of sample `number` as it is loaded now; None: it has none."""
    with generators_kept():
        seed_all(item_key(stream.seed, 0, number))
        try:
            sample = stream.dataset[number]
        except Exception as error:  # whatever the user's code says: training would meet it later
            return f"{UNREADABLE}{type(error).__name__}: {error}".splitlines()[0]
    digest = hashlib.sha256()
    try:
        _absorb(digest, sample)
    except _UnknownKindError:
        return None
    return digest.hexdigest()[:_LETTERS]


def find_others(kept: Fingerprint, now: Fingerprint) -> list[str]:
    """The numbers of the samples that both know and that are not alike, in the order of `now`; what could not be read
    then says nothing.
    """
    return [one for one in now if one in kept and kept[one] != now[one] and not kept[one].startswith(UNREADABLE)]


def _absorb(digest: Any, value: Any) -> None:
    """Take in a sample, with its kinds and shapes, so that no two are alike that are not."""
    if isinstance(value, torch.Tensor):
        _absorb_tensor(digest, value)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        digest.update(f"array {value.dtype.str} {value.shape};".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes | bytearray):
        digest.update(f"bytes {len(value)};".encode() + value)
    elif value is None or isinstance(value, bool | int | float | complex | str):
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=repr):
            _absorb(digest, key)
            _absorb(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)};".encode())
        for one in value:
            _absorb(digest, one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _absorb(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        raise _UnknownKindError


def _absorb_tensor(digest: Any, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _UnknownKindError
    digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().tobytes())
