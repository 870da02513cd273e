"""The manifest of a checkpoint: what it holds, with the digest of everything, as JSON that any reader understands
(schema 1).

    {"schema": 1, "run", "generation", "layout", "torch", "step", "samples",
     "files": {name: {"bytes", "chunks": [[offset, length, sha256], ...]}},
     "tensors": {name: {"dtype", "shape", "digest"}}, "aliases": {alias: name}, "state": {...}}

`files` covers every byte of every file: chunks follow each other without a gap, and one ends where a file's header
ends. `digest` is `allranks.digest.digest_hex`. A manifest is read as hostile: numbers and lengths are capped, names
cannot leave the directory, a key that stands twice is refused, and nothing is allocated from a number in it.
"""

import hashlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, ValidationError, model_validator

from allranks.errors import CheckpointError
from allranks.printable import printable
from allranks.units import format_bytes

MANIFEST_BYTES_CAP = 1 << 28  # 300,000 chunks of 16 MiB, a checkpoint of 5 TB, take a tenth of it
CHUNK_BYTES = 1 << 24
_CHUNK_BYTES_CAP = 1 << 26
_TENSORS_CAP = 1_000_000
_DIMS_CAP = 32
_VALUES_CAP = 20_000_000  # of one JSON document: each takes some 60 bytes, and the 300,000 chunks four each
_ELEMENTS_CAP = 1 << 58  # 16 bytes each make a Count; torch multiplies the strides of empty tensors, too, in 64 bits
_DEPTH_CAP = 100  # of `state`: far from where Python, which recurses over it, gives up
_NOT_FINITE = "__float__"

Count = Annotated[StrictInt, Field(ge=0, le=1 << 62)]
Progress = Annotated[StrictInt, Field(ge=0, lt=10**18)]  # a directory's name has 18 digits; sums stay below 2^63
Extent = Annotated[StrictInt, Field(ge=0, le=1 << 48)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors$")]
Text = Annotated[str, StringConstraints(max_length=65536)]


class FrozenModel(BaseModel):
    """A value that takes exactly the members it names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(FrozenModel):
    """One file: its length, and the SHA-256 of each of its chunks."""

    bytes: Count
    chunks: tuple[tuple[Count, Annotated[StrictInt, Field(ge=1, le=_CHUNK_BYTES_CAP)], Sha256], ...]

    @model_validator(mode="after")
    def _covers_every_byte(self) -> Self:
        end = 0
        for offset, length, _ in self.chunks:
            if offset != end:
                raise ValueError(f"a chunk begins at byte {offset}, the one before ends at {end}")
            end += length
        if end != self.bytes:
            raise ValueError(f"the chunks end at byte {end} of {self.bytes}")
        return self


class TensorRecord(FrozenModel):
    """One logical tensor."""

    dtype: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")]
    shape: Annotated[tuple[Extent, ...], Field(max_length=_DIMS_CAP)]
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]

    @model_validator(mode="after")
    def _has_strides(self) -> Self:
        if math.prod(extent for extent in self.shape if extent) > _ELEMENTS_CAP:
            raise ValueError(f"shape {self.shape} is larger than any tensor")
        return self


class Manifest(FrozenModel):
    """Everything that a checkpoint says of itself; `state` is as it was saved."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    run: Text
    generation: Count
    layout: Text
    torch: Text
    step: Progress
    samples: Progress
    files: Annotated[dict[FileName, FileRecord], Field(max_length=_TENSORS_CAP)]
    tensors: Annotated[dict[Name, TensorRecord], Field(max_length=_TENSORS_CAP)]
    aliases: Annotated[dict[Name, Name], Field(max_length=_TENSORS_CAP)]
    state: dict[str, Any]

    @model_validator(mode="after")
    def _aliases_lead_to_tensors(self) -> Self:
        for alias, name in self.aliases.items():
            if alias in self.tensors or name not in self.tensors:
                raise ValueError(f"alias {alias!r} of {name!r} does not lead from no tensor to one")
        return self


def render_manifest(manifest: Manifest) -> str:
    """The manifest as strict JSON, one line for each member. Raises CheckpointError: longer than any that is read."""
    members = manifest.model_dump(by_alias=True) | {"state": encode_state(manifest.state)}
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in members.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    check_readable(text)
    return text


def check_readable(text: str) -> None:
    """See that a manifest of this text, in ASCII, would be read again. Raises CheckpointError: it is too long."""
    num_values = sum(map(text.count, ",[{"))
    if len(text) > MANIFEST_BYTES_CAP or num_values > _VALUES_CAP:
        raise CheckpointError(
            f"the manifest, which holds what is no tensor, takes {format_bytes(len(text))} and {num_values:,} values; "
            f"at most {format_bytes(MANIFEST_BYTES_CAP)} and {_VALUES_CAP:,} are read: make what is large in it a "
            "buffer of the model"
        )


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors.

    Raises:
        CheckpointError: it is no JSON, of another schema, or breaks a rule of this module, in one line.
    """
    members = parse_json(data, where)
    schema = members.get("schema")
    if schema != 1 or isinstance(schema, bool):
        raise CheckpointError(
            f"{where}: schema {reprlib.repr(schema):.40}, this version of allranks reads schema 1; "
            "use the version that wrote it"
        )
    try:
        manifest = Manifest.model_validate(members)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_reason(error)}; the checkpoint is damaged") from None
    try:
        state = decode_state(manifest.state)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}; the checkpoint is damaged") from None
    return manifest.model_copy(update={"state": state})


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """One strict JSON object in which no key stands twice.

    Raises:
        CheckpointError: it is anything else.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _VALUES_CAP:
        raise CheckpointError(f"{where}: more than {_VALUES_CAP:,} values; the checkpoint is damaged")
    try:
        members = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(
            f"{where}: {str(error) or type(error).__name__:.200}; the checkpoint is damaged"
        ) from None
    if not isinstance(members, dict):
        raise CheckpointError(f"{where}: no JSON object; the checkpoint is damaged")
    return members


def first_reason(error: ValidationError) -> str:
    """The first of pydantic's reasons in a line, with the path to the value."""
    reason = error.errors(include_url=False, include_input=False)[0]
    return printable(f"{'.'.join(str(part) for part in reason['loc'])[:200]}: {reason['msg'][:200]}")


def encode_state(value: Any, key: str = "state", depth: int = 0) -> Any:
    """`value` as strict JSON data; a float that JSON has no word for becomes {"__float__": "nan"}.

    None, bool, int, float, str, and lists, tuples and string-keyed dicts of them are taken. Ints and floats come back
    exactly (a NaN as the NaN); a tuple comes back as a list. `depth`: of lists and dicts around `value`.

    Raises:
        CheckpointError: anything else, or what is nested deeper than is read, naming its key.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_NOT_FINITE: repr(float(value))}
    if isinstance(value, Mapping | list | tuple) and depth == _DEPTH_CAP:
        raise CheckpointError(f"{key[:80]}...: nested more than {_DEPTH_CAP} deep, which no checkpoint is")
    if isinstance(value, Mapping):
        for name in value:
            if type(name) is not str or name == _NOT_FINITE:
                raise CheckpointError(
                    f"{key}: the key {name!r:.80} cannot be kept in a checkpoint: use other strings as keys"
                )
        return {name: encode_state(item, f"{key}.{name}", depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_state(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise CheckpointError(
        f"{key}: a {type(value).__module__}.{type(value).__qualname__} cannot be kept as JSON: "
        "state is made of None, bool, int, float, str, lists and dicts"
    )


def decode_state(value: Any, depth: int = 0) -> Any:
    """The inverse of `encode_state`.

    Raises:
        CheckpointError: it is nested deeper than `encode_state` takes.
    """
    if not isinstance(value, dict | list):
        return value
    if isinstance(value, dict) and value.keys() == {_NOT_FINITE} and value[_NOT_FINITE] in ("nan", "inf", "-inf"):
        return float(value[_NOT_FINITE])
    if depth == _DEPTH_CAP:
        raise CheckpointError(f"state: nested more than {_DEPTH_CAP} deep")
    if isinstance(value, dict):
        return {name: decode_state(item, depth + 1) for name, item in value.items()}
    return [decode_state(item, depth + 1) for item in value]


def sha256_hex(data: bytes) -> str:
    """The SHA-256 of `data` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = min(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r:.80} stands twice")
    return members


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")
