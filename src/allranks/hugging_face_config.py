"""hugging_face_config: the ModelShape of a Hugging Face `config.json`.

A config.json has sizes, and `model_type` says what is made of them: whether the feed-forward is gated, the head tied,
keys shared by heads. What stands in no file is in a table here, as transformers builds it; any other type is refused.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from allranks.errors import ConfigError
from allranks.hugging_face_keys import INSTEAD, flag, short, whole
from allranks.hugging_face_windows import windows_of
from allranks.model_shape import ModelShape
from allranks.ordinary_file import read_small


@final
@dataclass(frozen=True, slots=True)
class _Built:
    """How transformers builds a type, where its config.json does not say.

    Attributes:
        gated, positions: as in ModelShape; they follow from the type, whatever the activation is called.
        tied: what an absent `tie_word_embeddings` means.
        bias: whether linear layers have one, or the key that says so ("!key": that says they have none) and what it
            means where it is absent. Of queries and keys alone it is too small to count.
        kv_heads: "heads" where an absent number of key heads means as many as queries; "said" where the type has a
            number of its own for that, which is no size of this model; "one" and "falcon": see `_kv_heads`.
        own_head_dim: whether an absent `head_dim` means a number of the type's own, too.
        causal: False for encoders.
    """

    gated: bool = True
    positions: Literal["rotary", "learned", "none"] = "rotary"
    tied: bool = False
    bias: bool | tuple[str, bool] = False
    kv_heads: Literal["heads", "said", "one", "falcon"] = "said"
    own_head_dim: bool = False
    causal: bool = True


_PLAIN = _Built(gated=False, bias=True, kv_heads="heads")
_GPT2 = _Built(gated=False, positions="learned", tied=True, bias=True, kv_heads="heads")
_ENCODER = _Built(gated=False, positions="learned", tied=True, bias=True, kv_heads="heads", causal=False)
_LLAMA, _SAID = _Built(kv_heads="heads"), _Built()
_OWN, _GEMMA = _Built(own_head_dim=True), _Built(tied=True, own_head_dim=True)

BUILT: Mapping[str, _Built] = {
    "gpt2": _GPT2,
    "gpt_neo": _GPT2,
    "gpt_bigcode": _Built(gated=False, positions="learned", tied=True, bias=True, kv_heads="one"),
    "opt": _Built(gated=False, positions="learned", tied=True, bias=("enable_bias", True), kv_heads="heads"),
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "gpt_neox": _PLAIN,
    "gptj": _PLAIN,
    "codegen": _PLAIN,
    "phi": _PLAIN,
    "starcoder2": _Built(gated=False, tied=True, bias=("use_bias", True)),
    "bloom": _Built(gated=False, positions="none", tied=True, bias=True, kv_heads="heads"),
    "mpt": _Built(gated=False, positions="none", tied=True, bias=("!no_bias", False), kv_heads="heads"),
    "falcon": _Built(gated=False, tied=True, bias=("bias", False), kv_heads="falcon"),
    "nemotron": _Built(gated=False, kv_heads="heads"),
    **dict.fromkeys(("llama", "phi3", "olmo", "olmo2", "olmoe", "stablelm", "granite", "deepseek_v2"), _LLAMA),
    **dict.fromkeys(("mistral", "mixtral", "qwen2", "qwen2_moe", "deepseek_v3"), _SAID),
    **dict.fromkeys(("qwen3", "qwen3_moe", "gpt_oss"), _OWN),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    "smollm3": _Built(tied=True),
    **dict.fromkeys(("cohere", "cohere2"), _Built(tied=True, kv_heads="heads")),
}
"""By `model_type`."""

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "every": ("decoder_sparse_step",),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}
_TOP_K = ("num_experts_per_tok", "top_k")
_MAY_BE_NONE = ("experts", "shared_ffn", "dense_layers")
"""Sizes of which there may be 0."""


def read_shape(path: Path) -> ModelShape:
    """The shape of the file at `path`, named after it, or after its folder where it is called config.json.

    Raises ConfigError that names the file, also where there is none or it is no JSON.
    """
    try:
        values = json.loads(read_small(path).decode())
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.json")], 1)
        raise ConfigError(f"{path}: no such file{f'; did you mean {near[0]}?' if near else ''}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a Hugging Face config.json: it holds no table of keys")
    try:
        return from_hugging_face(values, path.stem if path.stem != "config" else path.absolute().parent.name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_hugging_face(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape of a Hugging Face `config.json`, as a dict.

    Raises ConfigError that names a type that is not known, a size that is missing, or a key of another form.
    Source: https://huggingface.co/docs/transformers/main_classes/configuration
    """
    kind, built = _find_type(config)
    sizes = {ours: found for ours, keys in _NAMES.items() if (found := _size(config, ours, keys)) is not None}
    # In a model without experts `top_k` is a setting of generate(), as older versions of transformers saved them.
    if sizes.get("experts") and (top_k := _size(config, "top_k", _TOP_K)) is not None:
        sizes["top_k"] = top_k
    required = ["layers", "hidden", "heads", "vocab", *(["ffn"] * built.gated), *(["head_dim"] * built.own_head_dim)]
    for ours in required:
        if ours not in sizes:
            raise ConfigError(f"config.json says none of {', '.join(_NAMES[ours])}: the model's {ours}")
    sizes.setdefault("ffn", 4 * sizes["hidden"] if kind != "mpt" else _mpt_ffn(config, sizes["hidden"]))
    _refuse_mixed(config, kind, sizes)
    sizes["dense_layers"] = max(sizes.get("dense_layers", 0), _leading_dense(config))
    given: dict[str, Any] = {**sizes, "kv_heads": _kv_heads(config, kind, built, sizes["heads"])}
    if shared := whole(config, "n_shared_experts", 0):
        given["shared_ffn"] = shared * sizes.get("expert_ffn", sizes["ffn"])
    if sizes.get("kv_rank"):
        nope = whole(config, "qk_nope_head_dim", 1)
        given |= {"query_dim": (128 if nope is None else nope) + sizes.get("rope_dim", 0), "kv_heads": 0}
        given.setdefault("head_dim", given["query_dim"])
    given |= {
        "gated": built.gated,
        "positions": "none" if kind == "falcon" and flag(config, "alibi", False) else built.positions,
        "tied": flag(config, "tie_word_embeddings", built.tied),
        "bias": _bias(config, built),
        "causal": built.causal or flag(config, "is_decoder", False),
    }
    shape = ModelShape(**given, name=name or str(config.get("_name_or_path") or kind), source="config.json")
    return replace(shape, windows=windows_of(config, kind, shape.layers))


def _find_type(config: Mapping[str, Any]) -> tuple[str, _Built]:
    kind = config.get("model_type")
    if kind is None:
        raise ConfigError(f"config.json has no model_type, which says what its sizes mean; {INSTEAD}")
    if not isinstance(kind, str):
        raise ConfigError(f"model_type = {kind!r} is no text, such as 'llama'")
    if kind not in BUILT:
        near = difflib.get_close_matches(kind, BUILT, 2, 0.7)
        known = f"nearest: {', '.join(near)}" if near else f"those that are: {', '.join(sorted(BUILT))}"
        raise ConfigError(f"model_type {kind!r} is none whose parts allranks knows ({known}); {INSTEAD}")
    return kind, BUILT[kind]


def _size(config: Mapping[str, Any], ours: str, keys: tuple[str, ...]) -> int | None:
    """Of the first of `keys` that has a number."""
    least = 0 if ours in _MAY_BE_NONE else 1
    return next((found for key in keys if (found := whole(config, key, least)) is not None), None)


def _kv_heads(config: Mapping[str, Any], kind: str, built: _Built, heads: int) -> int:
    keys = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    said = _size(config, "kv_heads", keys)
    one = built.kv_heads in ("one", "falcon") and flag(config, "multi_query", True)
    if built.kv_heads == "falcon" and flag(config, "new_decoder_architecture", False):
        return said or heads
    if built.kv_heads in ("one", "falcon"):
        return 1 if one else heads
    if built.kv_heads == "said" and not any(key in config for key in keys):
        raise ConfigError(f"config.json of a {kind} does not say num_key_value_heads: the model's kv_heads")
    return said or heads


def _bias(config: Mapping[str, Any], built: _Built) -> bool:
    if isinstance(built.bias, bool):
        return built.bias
    key, absent = built.bias
    if key.startswith("!"):
        return not flag(config, key[1:], not absent)
    return flag(config, key, absent)


def _mpt_ffn(config: Mapping[str, Any], hidden: int) -> int:
    return (whole(config, "expansion_ratio", 1) or 4) * hidden


def _leading_dense(config: Mapping[str, Any]) -> int:
    """How many first layers have no experts, by Qwen's `mlp_only_layers`. Raises ConfigError where others have none."""
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        raise ConfigError(f"mlp_only_layers = {short(listed)} is no list of layers, such as [0, 1]")
    if sorted(listed) != list(range(len(listed))):
        raise ConfigError(f"mlp_only_layers = {short(listed)}: only leading layers without experts are known")
    return len(listed)


def _refuse_mixed(config: Mapping[str, Any], kind: str, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError for layers, or a table, that are not like the others."""
    if (frequency := whole(config, "moe_layer_freq", 1)) not in (None, 1):
        raise ConfigError(f"moe_layer_freq = {frequency}: experts in some layers only are not known of a {kind}")
    table = whole(config, "word_embed_proj_dim", 1)
    if table not in (None, sizes["hidden"]):
        raise ConfigError(f"word_embed_proj_dim = {table} is not hidden_size = {sizes['hidden']}; {INSTEAD}")
