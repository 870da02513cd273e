"""What the frameworks of published runs do, as Mechanisms: from their documents and code, as far as they say."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allranks.planning.setting import TENSOR_COPIES, Mechanisms

OLD = Mechanisms(
    name="Megatron-LM", fused_attention=False, fusion=0.7, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12,
    gather_bytes=2, reduce_bytes=2, overlap_data=0.0, scattered_sends=True, attention_dropout=True,
    dispatch_seconds=1.0e-5, logits_copies=1.5, selective="attention", accumulate_bytes=0,
    temporary_gradient_bytes=2, pipeline_outputs=False,
)  # fmt: skip
# Its stage 1 sums gradients by all-reduces: twice the bytes of a scatter.
DEEPSPEED = Mechanisms(
    name="Megatron-DeepSpeed", fused_attention=False, fusion=0.7, weight_bytes=2, gradient_bytes=2, optimizer_bytes=16,
    gather_bytes=2, reduce_bytes=4, overlap_data=0.0, attention_dropout=True, dispatch_seconds=3.4e-5,
    collective_kernels=1.0, selective="attention", accumulate_bytes=8, temporary_gradient_bytes=2, bucket_bytes=2e9,
    overlap_pipeline=0.6, wait_seconds=4.5e-5,
)  # fmt: skip
CORE = Mechanisms(
    name="Megatron-Core", fusion=0.6, weight_bytes=2, gradient_bytes=4, optimizer_bytes=12, gather_bytes=2,
    reduce_bytes=4, overlap_data=0.9, overlap_tensor=0.0, overlap_pipeline=0.7, sequence_parallel=True,
    dispatch_seconds=6e-6, logits_copies=1.5, scattered_sends=True, selective="attention", attention="vendor",
    accumulate_bytes=8, temporary_gradient_bytes=4, pipeline_outputs=False,
)  # fmt: skip
FLAGS = replace(CORE, overlap_tensor=0.6, accumulate_bytes=0)  # --tp-comm-overlap, gradient_accumulation_fusion
NEMO = replace(  # its recipes: grad_reduce_in_fp32=False, tp_comm_overlap, gradient_accumulation_fusion, DeepEP
    CORE, name="NeMo", gradient_bytes=2, reduce_bytes=2, overlap_tensor=0.6, accumulate_bytes=0, sends_once=True,
)  # fmt: skip
TITAN = Mechanisms(name="torchtitan", gather_bytes=2, reduce_bytes=4, sequence_parallel=True, dispatch_seconds=6e-6)
# When its tables were made (commits c6cfb42 of July 2023 to 5e85bd6 of January 2024) attn_impl was "triton" by default,
# and flash-attn 1.0.
FOUNDRY = Mechanisms(
    name="llm-foundry", gather_bytes=2, reduce_bytes=2, dispatch_seconds=8e-6, logits_copies=1.0, attention="flash1",
)  # fmt: skip
# As of 2021 it fetched parameters one by one, when they were needed.
ZERO = Mechanisms(
    name="DeepSpeed ZeRO-3", fused_attention=False, fusion=0.7, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12,
    gather_bytes=2, reduce_bytes=2, overlap_data=0.0, attention_dropout=True, bucket_bytes=2e9, messages=12,
)  # fmt: skip
JAX = Mechanisms(
    name="JAX", fusion=0.6, gather_bytes=2, reduce_bytes=4, dispatch_seconds=0.0, attention="vendor",
)  # fmt: skip
TORCH = ("titan", "fsdp", "nanogpt", "pytorch", "hugging", "accelerate", "lightning", "fms")
"""Words in the names of frameworks that run torch's own FSDP, DDP and loss."""


def mechanisms_of(row: Mapping[str, Any]) -> Mechanisms:
    """What is known of the row's framework; of an unknown one, that it is one of torch's or of Megatron-Core's kind."""
    name = str(row["framework"]).lower()
    if "zero-3" in name or ("deepspeed" in name and row["parallel"].get("zero") == 3):
        return ZERO
    if "deepspeed" in name:
        return _deepspeed(row)
    if "megatron-lm" in name and row["hardware"]["gpu"][0] in "AV":  # before FlashAttention
        return replace(OLD, sequence_parallel=bool(row["parallel"].get("sp")))
    if "jax" in name or "maxtext" in name or "pax" in name:
        return JAX
    if "nemo" in name or "bridge" in name:
        return NEMO
    if "megatron" in name:
        return FLAGS if "megatron-core" in name else CORE
    if "foundry" in name or "fsdp1" in name or "composer" in name:
        return FOUNDRY
    if any(word in name for word in TORCH):
        return _torch(row)
    return replace(CORE, name=name, sequence_parallel=bool(row["parallel"].get("sp")))


def _torch(row: Mapping[str, Any]) -> Mechanisms:
    notes = str(row.get("notes"))
    fusion, hidden = 0.6 if "torch.compile" in notes else 1.0, 0.5 if "async TP" in notes else 0.0
    # enable_loss_parallel is its default
    return replace(TITAN, fusion=fusion, overlap_tensor=hidden, cut_logits_copies=TENSOR_COPIES)


def _deepspeed(row: Mapping[str, Any]) -> Mechanisms:
    if "Omni-Path" in str(row["hardware"].get("inter_note")):
        # It knows no GPUDirect: what a stage sends passes through the host.
        gradients = 6.0 if "fp32 gradient" in row["precision"] else 2.0
        return replace(DEEPSPEED, dispatch_seconds=1.5e-5, gradient_bytes=gradients, overlap_pipeline=0.0)
    if row["parallel"].get("zero"):
        return DEEPSPEED
    return replace(DEEPSPEED, optimizer_bytes=12, step_bytes=4, reduce_bytes=2)
