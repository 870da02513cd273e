"""named_models: the NAMES that `allranks plan` and `dryrun` know, and shapes from files and keywords."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.errors import ConfigError
from allranks.hugging_face_config import read_shape
from allranks.model_shape import ModelShape

_LLAMA: dict[str, Any] = {"gated": True, "positions": "rotary", "tied": False, "bias": False, "seq": 8192}


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int, **other: Any) -> ModelShape:
    given: dict[str, Any] = {**_LLAMA, "vocab": 128256, "kv_heads": 8, **other}
    return ModelShape(name, layers, hidden, heads, ffn, **given)


def _gpt(name: str, layers: int, hidden: int, heads: int, **other: Any) -> ModelShape:
    given: dict[str, Any] = {"ffn": 4 * hidden, "vocab": 51200, "seq": 2048, **other}
    return ModelShape(name, layers, hidden, heads, **given)


NAMED: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt("gpt2", 12, 768, 12, vocab=50257, seq=1024, source="Radford et al. 2019"),
        _gpt("gpt2-xl", 48, 1600, 25, vocab=50257, seq=1024, source="Radford et al. 2019"),
        _gpt("gpt3-175b", 96, 12288, 96, source="Brown et al. 2005.14165, table 2.1; vocabulary padded by Megatron-LM"),
        _llama("llama2-7b", 32, 4096, 32, 11008, kv_heads=32, vocab=32000, seq=4096, source="2307.09288"),
        _llama("llama2-70b", 80, 8192, 64, 28672, vocab=32000, seq=4096, source="2307.09288"),
        _llama("llama3-8b", 32, 4096, 32, 14336, source="2407.21783, table 3"),
        _llama("llama3-70b", 80, 8192, 64, 28672, source="2407.21783, table 3"),
        _llama("llama3-405b", 126, 16384, 128, 53248, source="2407.21783, table 3"),
        _llama("100b", 80, 10240, 80, 32768, source="allranks: a dense model just above 100 billion parameters"),
        _llama(
            "mixtral-8x7b", 32, 4096, 32, 14336, vocab=32000, experts=8, top_k=2, seq=4096, source="2401.04088, table 1"
        ),
        _llama(
            "deepseek-v3", 61, 7168, 128, 18432, vocab=129280, kv_heads=0, seq=4096, head_dim=128, experts=256, top_k=8,
            expert_ffn=2048, shared_ffn=2048, dense_layers=3, query_rank=1536, kv_rank=512, query_dim=192, rope_dim=64,
            value_dim=128, source="2412.19437, section 4.2",
        ),
    )
}  # fmt: skip


def find_shape(name: str, **sizes: Any) -> ModelShape:
    """Of a name, of the path of a Hugging Face `config.json`, or of sizes alone where `name` is empty.

    Raises ConfigError as `find_model`, `read_shape` and `shape_of` do.
    """
    if not name:
        return shape_of(**sizes)
    if name.endswith(".json"):
        return change(read_shape(Path(name)), **sizes)
    return find_model(name, **sizes)


def find_model(name: str, **changes: Any) -> ModelShape:
    """The shape of that name, with `changes` to its fields.

    Raises ConfigError with the nearest names, or with the fields that there are.
    """
    shape = NAMED.get(name.lower())
    if shape is None:
        near = difflib.get_close_matches(name.lower(), NAMED, 3, 0.4) or sorted(NAMED)
        raise ConfigError(f"{name!r} is no model that allranks knows by name; nearest: {', '.join(near)}")
    return change(shape, **changes)


def change(shape: ModelShape, **changes: Any) -> ModelShape:
    """`shape` with other sizes. Raises ConfigError at a size that no shape has, or that this one has not."""
    if shape.kv_rank and changes.get("kv_heads"):
        raise ConfigError(
            f"{shape.name}: kv_heads={changes['kv_heads']}, but latent attention has one vector of {shape.kv_rank} for"
            " all heads, and no key-value heads; leave it out"
        )
    if shape.experts and shape.expert_ffn and not shape.dense_layers and shape.every == 1 and changes.get("ffn"):
        raise ConfigError(
            f"{shape.name}: ffn={changes['ffn']} changes nothing, because each of its layers has experts, whose own"
            f" width is {shape.expert_ffn}; leave it out"
        )
    return _make({**{name: getattr(shape, name) for name in _FIELDS}, **changes})


def shape_of(**sizes: Any) -> ModelShape:
    """A shape from keywords: layers, hidden and heads at least; `ffn` is 4 * hidden, `vocab` 50257 where not said.

    Raises ConfigError that names what is missing or unknown.
    """
    missing = [name for name in ("layers", "hidden", "heads") if not sizes.get(name)]
    if missing:
        raise ConfigError(f"a model shape needs {', '.join(missing)} too: --layers 32 --hidden 4096 --heads 32")
    given = {"name": "shape", "ffn": 4 * sizes["hidden"], "vocab": 50257}
    return _make({**given, **{name: value for name, value in sizes.items() if value is not None}})


def _make(sizes: Mapping[str, Any]) -> ModelShape:
    for name in sizes:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, 2, 0.4)
            raise ConfigError(f"a model shape has no {name!r}; nearest: {', '.join(near or _FIELDS)}")
    return ModelShape(**sizes)


_FIELDS = tuple(ModelShape.__dataclass_fields__)
