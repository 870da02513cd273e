"""What the frameworks of published runs do, as Mechanisms: from their documents and code, as far as they say."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allranks.planning.mechanisms import TENSOR_COPIES, Mechanisms

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
    dispatch_seconds=1.5e-5, logits_copies=1.5, scattered_sends=True, selective="attention", attention="vendor",
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
# Since (overlap_comm, and blocks fetched ahead as one; stage3_prefetch_bucket_size) its users' models are Hugging
# Face's, with FlashAttention-2 and torch's own elementwise kernels. Its hooks at every module hold the host up: short
# samples of a 1.8B model take as long as 1024 positions.
LATER_ZERO = replace(
    ZERO, fused_attention=True, attention_dropout=False, fusion=1.0, overlap_data=0.9, messages=1, bucket_bytes=0.0,
    logits_copies=3.0, dispatch_seconds=1.5e-4,
)  # fmt: skip
LATER_DEEPSPEED = replace(
    DEEPSPEED, fused_attention=True, attention_dropout=False, fusion=1.0, overlap_data=0.5, dispatch_seconds=8e-6,
    logits_copies=3.0, bucket_bytes=1e9,
)  # fmt: skip
JAX = Mechanisms(
    name="JAX", fusion=0.6, gather_bytes=2, reduce_bytes=4, dispatch_seconds=0.0, attention="vendor",
)  # fmt: skip
LLM_C = replace(CORE, name="llm.c", sequence_parallel=False)  # its own fused kernels and cuDNN's attention
TORCH = (
    "titan", "fsdp", "nanogpt", "pytorch", "accelerate", "lightning", "fms", "torchtune", "litgpt",
)  # fmt: skip
"""Words in the names of frameworks that run torch's own FSDP, DDP and loss."""
ADAPTED = ("xtuner", "swift", "hugging", "transformers", "llama-factory", "axolotl", "trl", "deepspeed-chat")
"""Words in the names of frameworks that train Hugging Face's models with DeepSpeed."""
NORM_BY_HAND = re.compile(rf"{'|'.join(ADAPTED)}|(rms)?norm not fused|unfused (rms)?norm")
"""Where RMSNorm is transformers' own module, or the source says that it is not one kernel."""
BEFORE_FLASH = ("V100", "A100", "A800")
"""GPU generations on which Megatron-LM, NeMo and DeepSpeed trained GPTs before they had FlashAttention (2022)."""
NO_FLASH = re.compile(r"\b(no|without) flash")
"""In a source's words: attention wrote its scores."""
LOW_STATES = re.compile(
    r"(param|weight|gradient|state|optim|adam|momen)[^.;]*\b(kept|held|stored)?\s*in bf16|bf16 \(param"
    r"|pure (bf16|fp16)|(bf16|fp16) \(weights, pure|torch_dtype b?float16"
)
"""In a source's words: no float32 copy of anything."""


def mechanisms_of(row: Mapping[str, Any]) -> Mechanisms:
    """What is known of the row's framework; of an unknown one nothing but what Megatron-LM and torch both do."""
    how = _of_framework(row)
    text = f"{row['precision']}; {row.get('notes')}".lower()
    if (
        not _is_early(row)
        and row["model"]["arch"] != "gpt"
        and NORM_BY_HAND.search(f"{row['framework']} {text}".lower())
    ):
        how = replace(how, norm_passes=9.0)
    if (row["parallel"].get("etp") or 1) > 1:
        how = replace(how, tensor_in_experts=True)
    if NO_FLASH.search(text):
        how = replace(how, fused_attention=False, attention_dropout=row["model"]["arch"] in ("gpt", "bert"))
    if LOW_STATES.search(text):
        how = replace(how, weight_bytes=2, gradient_bytes=2, optimizer_bytes=4, temporary_gradient_bytes=2)
    return _with_frozen_base(how, text) if row.get("task") == "lora" else how


def _with_frozen_base(how: Mechanisms, text: str) -> Mechanisms:
    """Of what adapters are added to nothing learns: it stands in 16 bits, or in four with a scale for every 64."""
    if "autocast" in text or "fp32 master" in text:
        return how
    held = 0.5 + 4 / 64 if re.search(r"\b(nf4|qlora|4[- ]bit)\b", text) else 2.0
    return replace(how, weight_bytes=held, gather_bytes=min(held, how.gather_bytes))


def _of_framework(row: Mapping[str, Any]) -> Mechanisms:
    name, zero = str(row["framework"]).lower(), row["parallel"].get("zero") or 0
    early = _is_early(row)
    if any(word in name for word in ADAPTED) and zero and "fsdp" not in name:
        return LATER_ZERO if zero == 3 else LATER_DEEPSPEED
    if "zero-3" in name or ("deepspeed" in name and zero == 3):
        return ZERO if early else LATER_ZERO
    if "deepspeed" in name:
        return _deepspeed(row) if early else replace(_deepspeed(row), fused_attention=True, attention_dropout=False)
    if early and ("megatron" in name or "nemo" in name):
        return replace(OLD, sequence_parallel=bool(row["parallel"].get("sp")))
    if "jax" in name or "maxtext" in name or "pax" in name:
        return JAX
    if "foundry" in name or "fsdp1" in name or "composer" in name:
        return FOUNDRY
    if any(word in name for word in TORCH):
        return _torch(row)
    if "nemo" in name or "bridge" in name:
        return _on_its_device(NEMO, row)
    if "megatron" in name:
        return _on_its_device(FLAGS if "megatron-core" in name else CORE, row)
    if "llm.c" in name:
        return LLM_C
    unknown = replace(CORE, name=name, fusion=1.0, attention="flash2", known=False)
    return replace(unknown, sequence_parallel=bool(row["parallel"].get("sp")))


def _is_early(row: Mapping[str, Any]) -> bool:
    """Whether its attention wrote its scores: as its source says, else a GPT of the years before FlashAttention."""
    text = f"{row['framework']}; {row.get('notes')}".lower()
    if NO_FLASH.search(text):
        return True
    if "flash" in text or "megatron-core" in text:
        return False
    old = row["model"]["arch"] in ("gpt", "bert") and not row["model"].get("gated")
    return old and str(row["hardware"]["gpu"]).startswith(BEFORE_FLASH)


def _on_its_device(how: Mechanisms, row: Mapping[str, Any]) -> Mechanisms:
    """Transformer Engine takes cuDNN's attention on Hopper and later devices, FlashAttention-2 on earlier ones."""
    earlier = str(row["hardware"]["gpu"])[:2] in ("V1", "A1", "A8", "L4", "RT")
    return replace(how, attention="flash2") if earlier else how


def _torch(row: Mapping[str, Any]) -> Mechanisms:
    notes = str(row.get("notes"))
    compiled = "torch.compile" in f"{row['framework']} {notes}"
    hidden = 0.5 if "async TP" in notes else 0.0
    # enable_loss_parallel is its default
    how = replace(TITAN, overlap_tensor=hidden, cut_logits_copies=TENSOR_COPIES)
    if not compiled:
        return how
    # From 2025 on it compiles the loss, too: its float32 logits are never written.
    whole = "titan" in str(row["framework"]) and not re.search(r"202[34]", f"{row['source']} {row.get('where')}")
    return replace(how, fusion=0.6, logits_copies=1.0 if whole else how.logits_copies)


def _deepspeed(row: Mapping[str, Any]) -> Mechanisms:
    if "Omni-Path" in str(row["hardware"].get("inter_note")):
        # It knows no GPUDirect: what a stage sends passes through the host.
        gradients = 6.0 if "fp32 gradient" in row["precision"] else 2.0
        return replace(DEEPSPEED, dispatch_seconds=1.5e-5, gradient_bytes=gradients, overlap_pipeline=0.0)
    if row["parallel"].get("zero"):
        return DEEPSPEED
    return replace(DEEPSPEED, optimizer_bytes=12, step_bytes=4, reduce_bytes=2)
