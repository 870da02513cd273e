"""Models of published runs: a row's sizes as ModelShape, and what one sample of it costs."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from frameworks import mechanisms_of

from allranks.model_profile import ModelProfile, Operation
from allranks.model_shape import ModelShape
from allranks.shape_operations import Program

Row = Mapping[str, Any]


@cache
def _profile(shape: ModelShape, seq: int, precision: str, fused: bool) -> ModelProfile:
    return shape.profile(seq, precision, Program(fused=fused))


def shape_of(row: Row) -> ModelShape | None:
    """The row's model, its vocabulary padded as all these frameworks pad it; None where the row leaves sizes open."""
    model = row["model"]
    if not all(model.get(key) for key in ("layers", "hidden", "heads")):
        return None
    hidden, encoder = model["hidden"], model["arch"] == "bert"
    gpt = (model["arch"] == "gpt" or encoder) and not model.get("gated")
    gated = model.get("gated")
    if gated is None:
        gated = model["arch"] not in ("gpt", "bert", "nemotron", "nemotron-h")
    dropout = gpt and mechanisms_of(row).attention_dropout
    given: dict[str, Any] = {}
    if model.get("experts"):
        given = {
            "experts": model["experts"], "top_k": model["top_k"],
            "expert_ffn": model.get("moe_ffn") or model.get("ffn") or 0,
            "shared_ffn": model.get("shared_ffn") or (model.get("shared_experts") or 0) * (model.get("moe_ffn") or 0),
            "dense_layers": model.get("dense_layers") or 0, "every": model.get("moe_every") or 1,
        }  # fmt: skip
    if model.get("kv_lora"):
        given |= {
            "query_rank": model.get("q_lora") or 0, "kv_rank": model["kv_lora"], "query_dim": model["qk_head_dim"],
            "rope_dim": model["qk_rope"], "value_dim": model["v_head_dim"],
        }  # fmt: skip
    return ModelShape(
        name=model["name"], layers=model["layers"], hidden=hidden, heads=model["heads"],
        kv_heads=0 if model.get("kv_lora") else model.get("kv_heads") or 0,
        ffn=model.get("ffn") or given.get("expert_ffn") or 4 * hidden,
        vocab=-(-(model.get("vocab") or 51200) // 128) * 128, seq=model["seq_len"], gated=bool(gated),
        head_dim=model.get("head_dim") or 0,
        positions="learned" if gpt and "alibi" not in str(model.get("pos")) else "none" if gpt else "rotary",
        tied=gpt if model.get("tied") is None else bool(model["tied"]), bias=gpt, dropout=dropout,
        causal=not encoder if model.get("causal") is None else bool(model["causal"]), **given,
    )  # fmt: skip


def precision_of(row: Row) -> str:
    """As `train.precision`."""
    text = row["precision"].lower()
    if "fp4" in text:
        return "float4"
    if "fp8" in text or "float8" in text:
        return "float8"
    return "float32" if text.startswith(("fp32", "float32", "single")) or is_tf32(row) else "bfloat16"


def is_tf32(row: Row) -> bool:
    """Whether products of float32 numbers run in TF32."""
    return str(row["precision"]).lower().startswith(("tf32", "tensorfloat32", "fp32 (tf32", "fp32+tf32"))


def profile_of(row: Row) -> ModelProfile | None:
    """The row's model for its samples."""
    shape = shape_of(row)
    if shape is None:
        return None
    whole = _profile(shape, row["model"]["seq_len"], precision_of(row), mechanisms_of(row).fusion < 1)
    told = row.get("derived", {}).get("vocab_head_on_fraction_of_positions")
    return whole if told is None or told == 1 else _with_fewer_logits(whole, float(told))


def _with_fewer_logits(profile: ModelProfile, share: float) -> ModelProfile:
    """With an output layer that sees a share of the positions: an encoder's masked ones."""
    head = profile.blocks[-1]
    scaled = [_scaled(one, share) if one.cut == "vocab" else one for one in head.operations]
    return replace(profile, blocks=(*profile.blocks[:-1], replace(head, operations=tuple(scaled))))


def _scaled(operation: Operation, share: float) -> Operation:
    rows = tuple([round(operation.shape[0] * share), *operation.shape[1:]] if operation.shape else ())
    return replace(
        operation, shape=rows, flops=operation.flops * share, moved_bytes=operation.moved_bytes * share,
        saved_bytes=operation.saved_bytes * share, output_bytes=operation.output_bytes * share,
    )  # fmt: skip
