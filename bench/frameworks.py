"""What the frameworks of published runs do, as Mechanisms: from their documents and code, as far as they say."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allranks.planning.setting import Mechanisms

OLD = Mechanisms(
    name="Megatron-LM", fused_attention=False, fusion=0.7, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12,
    gather_bytes=2, reduce_bytes=2, overlap_data=0.0, scattered_sends=True, attention_dropout=True,
    dispatch_seconds=1.0e-5, logits_copies=0.75, selective="attention", accumulate_bytes=0,
    temporary_gradient_bytes=2, pipeline_outputs=False,
)  # fmt: skip
# Its stage 1 sums gradients by all-reduces: twice the bytes of a scatter.
DEEPSPEED = Mechanisms(
    name="Megatron-DeepSpeed", fused_attention=False, fusion=0.7, weight_bytes=2, gradient_bytes=2, optimizer_bytes=16,
    gather_bytes=2, reduce_bytes=4, overlap_data=0.0, attention_dropout=True, dispatch_seconds=3.4e-5,
    collective_kernels=1.0, selective="attention", accumulate_bytes=8, temporary_gradient_bytes=2, bucket_bytes=2e9,
    overlap_pipeline=0.6,
)  # fmt: skip
CORE = Mechanisms(
    name="Megatron-Core", fusion=0.6, weight_bytes=2, gradient_bytes=4, optimizer_bytes=12, gather_bytes=2,
    reduce_bytes=4, overlap_data=0.9, overlap_tensor=0.0, overlap_pipeline=0.7, sequence_parallel=True,
    dispatch_seconds=6e-6, logits_copies=0.75, scattered_sends=True, selective="attention", attention="vendor",
    accumulate_bytes=8, temporary_gradient_bytes=4, pipeline_outputs=False,
)  # fmt: skip
FLAGS = replace(CORE, overlap_tensor=0.6, accumulate_bytes=0)  # --tp-comm-overlap, gradient_accumulation_fusion
NEMO = replace(  # its recipes: grad_reduce_in_fp32=False, tp_comm_overlap, gradient_accumulation_fusion, DeepEP
    CORE, name="NeMo", gradient_bytes=2, reduce_bytes=2, overlap_tensor=0.6, accumulate_bytes=0, sends_once=True,
)  # fmt: skip
TITAN = Mechanisms(name="torchtitan", gather_bytes=2, reduce_bytes=4, sequence_parallel=True, dispatch_seconds=6e-6)
FOUNDRY = Mechanisms(name="llm-foundry", gather_bytes=2, reduce_bytes=2, dispatch_seconds=8e-6, logits_copies=0.5)
ZERO = Mechanisms(
    name="DeepSpeed ZeRO-3", fused_attention=False, fusion=0.7, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12,
    gather_bytes=2, reduce_bytes=2, overlap_data=0.8, attention_dropout=True, bucket_bytes=2e9, messages=12,
)  # fmt: skip
JAX = Mechanisms(
    name="JAX", fusion=0.6, gather_bytes=2, reduce_bytes=4, dispatch_seconds=0.0, attention="vendor",
)  # fmt: skip


def mechanisms_of(row: Mapping[str, Any]) -> Mechanisms:
    """What is known of the row's framework."""
    name, source, sp = row["framework"], row["source"], bool(row["parallel"].get("sp"))
    if name.startswith("Megatron-DeepSpeed"):
        if source == "bloom-prequel":
            bf16 = "fp32 gradient" in row["precision"]
            # Omni-Path knows no GPUDirect: what a stage sends passes through the host.
            return replace(
                DEEPSPEED, dispatch_seconds=1.5e-5, gradient_bytes=6.0 if bf16 else 2.0, overlap_pipeline=0.0
            )
        return (
            DEEPSPEED
            if row["parallel"].get("zero")
            else replace(DEEPSPEED, optimizer_bytes=12, step_bytes=4, reduce_bytes=2)
        )
    if "ZeRO-3" in name:
        return ZERO
    if name in ("Megatron-LM", "Megatron-LM fork") and row["hardware"]["gpu"][0] in "AV":  # before FlashAttention
        return replace(OLD, sequence_parallel=sp)
    if "torchtitan" in name:
        notes = str(row.get("notes"))
        return replace(
            TITAN, fusion=0.6 if "torch.compile" in notes else 1.0, overlap_tensor=0.5 if "async TP" in notes else 0.0
        )
    if "llm-foundry" in name:
        return FOUNDRY
    if "JAX" in name:
        return JAX
    if "FSDP1" in name:
        return FOUNDRY
    if name in ("llm.c", "picotron") or "nanoGPT" in name or "Meta" in name:
        return replace(CORE, name=name, sequence_parallel=False)
    if "NeMo" in name or "Bridge" in name:
        return NEMO
    return FLAGS if "Megatron-Core" in name else CORE
