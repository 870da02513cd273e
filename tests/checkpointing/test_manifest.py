"""The manifest comes back as it was written, and nothing else is taken for one."""

import json
import math
import random
import re
from typing import Any

import pytest
import torch

from allranks.checkpointing import manifest
from allranks.checkpointing.manifest import (
    FileRecord,
    Manifest,
    TensorRecord,
    decode_state,
    encode_state,
    parse_json,
    parse_manifest,
    render_manifest,
)
from allranks.errors import CheckpointError

SHA = "0123456789abcdef" * 4


def example(**changes: Any) -> Manifest:
    members: dict[str, Any] = {
        "run": "20260101-digits-a3f9",
        "generation": 3,
        "layout": "dp_shard=2",
        "torch": "2.13.0",
        "step": 200,
        "samples": 6400,
        "files": {"rank-00000.safetensors": FileRecord(bytes=30, chunks=((0, 10, SHA), (10, 20, SHA)))},
        "tensors": {"model.w": TensorRecord(dtype="float32", shape=(2, 3), digest="00ff" * 4)},
        "aliases": {"model.head": "model.w"},
        "state": {"position": 6400, "schedule": {"best": math.inf, "betas": [0.9, 0.999]}},
    }
    return Manifest(**(members | changes))


def members() -> dict[str, Any]:
    """The example as a reader's JSON library sees it."""
    found: dict[str, Any] = json.loads(render_manifest(example()))
    return found


@pytest.mark.parametrize(("cap", "most"), [("MANIFEST_BYTES_CAP", 2000), ("_VALUES_CAP", 300)])
def test_what_would_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch, cap: str, most: int) -> None:
    monkeypatch.setattr(manifest, cap, most)
    assert parse_manifest(render_manifest(example()).encode(), "here") == example()
    with pytest.raises(CheckpointError, match=r"the manifest, .* are read: make what is large in it a buffer"):
        render_manifest(example(state={"losses": [0.5] * 500}))


def test_a_manifest_comes_back_and_is_json_for_everybody() -> None:
    text = render_manifest(example())
    assert parse_manifest(text.encode(), "here") == example()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    assert list(found)[:2] == ["schema", "run"] and found["schema"] == 1
    assert found["files"]["rank-00000.safetensors"] == {"bytes": 30, "chunks": [[0, 10, SHA], [10, 20, SHA]]}
    assert found["tensors"]["model.w"] == {"dtype": "float32", "shape": [2, 3], "digest": "00ff" * 4}


def test_state_comes_back_exactly() -> None:
    draw = random.Random(0)
    floats = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300) for _ in range(500)]
    state = {
        "floats": [*floats, 0.1, 1e-323, -0.0, 1.7976931348623157e308, math.inf, -math.inf],
        "ints": [2**64 - 1, -(2**63), 2**200, 0],
        "flags": [True, False, None],
        "text": "ü \n \ud7ff \U0001f600",
        "nested": {"": {"a": [[], {}, [{}]]}},
    }
    found = parse_manifest(render_manifest(example(state=state)).encode(), "here").state
    assert repr(found) == repr(state)  # repr tells 0.0 from -0.0 and True from 1
    assert math.isnan(decode_state(encode_state([math.nan]))[0])
    assert decode_state(encode_state({"betas": (0.9, 0.99)})) == {"betas": [0.9, 0.99]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, torch.zeros(1)]}}, "state.a.b[1]: a torch.Tensor cannot be kept as JSON"),
        ({"a": b"x"}, "state.a: a builtins.bytes"),
        ({"a": {1: 2}}, "state.a: the key 1 cannot be kept"),
        ({"a": {"__float__": "nan"}}, "state.a: the key '__float__' cannot be kept"),
        ({"a": {1, 2}}, "state.a: a builtins.set"),
        ({"a": 1j}, "state.a: a builtins.complex"),
    ],
)
def test_what_is_no_json_is_refused_by_its_key(state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        encode_state(state)


@pytest.mark.parametrize("shape", [(2**48, 2**10, 0), (0, 2**48, 2**10), (0,), (2**29, 0, 2**29)])
def test_a_tensor_that_the_largest_shapes_describe_can_be_made(shape: tuple[int, ...]) -> None:
    record = TensorRecord(dtype="complex128", shape=shape, digest="00ff" * 4)
    assert torch.empty(record.shape, dtype=torch.complex128).numel() == 0


def nested(depth: int, innermost: Any = 1) -> Any:
    """A value inside that many lists and dicts in turn."""
    for level in range(depth):
        innermost = [innermost] if level % 2 else {"a": innermost}
    return innermost


@pytest.mark.parametrize("depth", [101, 301, 501, 901])
def test_what_is_nested_deep_is_refused_in_one_line_wherever_it_is_read(depth: int) -> None:
    """The JSON library takes all of these; what recurses over what it gives may not."""
    pairs = depth // 2
    deep = '{"a": [' * pairs + '{"a": 1}' + "]}" * pairs
    for key, said in (("state", "state: nested more than 100 deep; the checkpoint is damaged"), ("schema", "schema {")):
        data = json.dumps(members() | {key: "DEEP"}).replace('"DEEP"', deep)
        with pytest.raises(CheckpointError, match=rf"^here: {said}") as caught:
            parse_manifest(data.encode(), "here")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_what_is_saved_is_never_nested_too_deep_to_be_read() -> None:
    for innermost in (1, math.inf, "x"):
        state = nested(99, innermost)
        assert parse_manifest(render_manifest(example(state=state)).encode(), "here").state == state
    with pytest.raises(CheckpointError, match=r"^state\.a\[0\].*nested more than 100 deep"):
        encode_state(nested(101))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        encode_state({"a": endless})


def _set(path: str, value: Any = None) -> Any:
    def change(found: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            found = found[key]
        found[last] = value

    return pytest.param(change, id=f"{path}={str(value)[:40]}")


@pytest.mark.parametrize(
    "change",
    [
        *(_set("schema", value) for value in (2, 0, "1", True, None, [1])),
        *(_set("step", value) for value in (-1, 2**63, 1.0, "200", True, None)),
        *(_set(member, value) for member in ("step", "samples") for value in (10**18, 2**62)),
        *(_set("generation", value) for value in (-1, "a")),
        *(_set("run", value) for value in (3, None, "x" * 70000)),
        _set("unknown", 1),
        _set("files", []),
        _set("files", {"../x.safetensors": {"bytes": 0, "chunks": []}}),
        *(
            _set(f"files/{name}", {"bytes": 0, "chunks": []})
            for name in (
                "rank-00000.pt",
                ".hidden.safetensors",
                "a\\b.safetensors",
                "\n.safetensors",
                "a.safetensors\n",
                "",
            )
        ),
        _set("files/rank-00000.safetensors", {"bytes": 2**63, "chunks": [[0, 2**63, SHA]]}),
        _set("files/rank-00000.safetensors", {"bytes": 2**40, "chunks": [[0, 2**40, SHA]]}),
        _set("files/rank-00000.safetensors", {"bytes": 30, "chunks": [[0, 10, SHA]]}),
        _set("files/rank-00000.safetensors", {"bytes": 30, "chunks": [[0, 20, SHA], [10, 20, SHA]]}),
        _set("files/rank-00000.safetensors", {"bytes": 30, "chunks": [[0, 10, SHA], [20, 10, SHA]]}),
        _set("files/rank-00000.safetensors", {"bytes": 30, "chunks": [[5, 10, SHA], [10, 20, SHA]]}),
        _set("files/rank-00000.safetensors", {"bytes": 30, "chunks": [[0, 30, SHA.upper()]]}),
        _set("files/rank-00000.safetensors", {"bytes": 30, "chunks": [[0, 30, SHA + "\n"]]}),
        _set("files/rank-00000.safetensors", {"bytes": 0, "chunks": [[0, 0, SHA]]}),
        _set("tensors/model.w/shape", [2**63]),
        _set("tensors/model.w/shape", [-1]),
        _set("tensors/model.w/shape", [1] * 40),
        _set("tensors/model.w/shape", [2**48, 2**48]),
        _set("tensors/model.w/shape", [2**48, 2**48, 2**48, 0]),
        _set("tensors/model.w/dtype", "float32; x"),
        _set("tensors/model.w/digest", "0"),
        _set("tensors/model.w/more", 1),
        _set("aliases/model.head", "model.other"),
        _set("aliases/model.w", "model.w"),
        _set("state", []),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused_in_one_line(change: Any) -> None:
    found = members()
    parse_manifest(json.dumps(found).encode(), "here")
    change(found)
    with pytest.raises(CheckpointError, match=r"^here: ") as caught:
        parse_manifest(json.dumps(found).encode(), "here")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"schema": 1, "schema": 1}',
        b'{"state": {"a": 1, "a": 2}}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"[" * 200_000,
        b'{"state": [' + b"[]," * 20_000_000 + b"0]}",
        b'{"a":' * 200_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
        render_manifest(example()).encode()[:-20],
    ],
    ids=lambda data: repr(data[:24]),
)
def test_what_is_no_strict_json_object_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^here: ") as caught:
        parse_json(data, "here")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_no_mutated_manifest_gets_another_exception_than_ours() -> None:
    draw = random.Random(0)
    text = render_manifest(example()).encode()
    for _ in range(100_000):
        data = bytearray(text)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            if draw.random() < 0.5:
                data[at] = draw.choice(b'0123456789{}[]",:-eE\\ \x00\xff')
            else:
                del data[at : at + draw.randint(1, 9)]
        try:
            parse_manifest(bytes(data), "here")
        except CheckpointError:
            continue
