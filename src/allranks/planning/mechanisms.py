"""Mechanisms: what a framework does besides the degrees that are asked of it; ours, or that of a published run."""

from dataclasses import dataclass, field
from functools import cache
from typing import Literal, final

from allranks.cluster import FixedSeconds
from allranks.plan import Choice
from allranks.planning.constants import AttentionKernel


@final
@dataclass(frozen=True, slots=True)
class Mechanisms:
    """What a framework does, as its documents or its code say; nothing here is fitted to runs but what the host
    takes: `dispatch_seconds` and `wait_seconds`.

    Attributes:
        fused_attention: attention that keeps no scores (FlashAttention 2205.14135); else they are written and kept.
        fusion: share of a profile's elementwise traffic that is left where kernels are fused.
        norm_passes: how often a norm moves what one kernel would: 9 where torch's elementwise kernels make it, with
            float32 between (transformers' LlamaRMSNorm in 16 bits: 36 bytes an element to 4, 70 in its backward to 8).
        weight_bytes, gradient_bytes, optimizer_bytes: kept per parameter (the optimizer's with its master weights).
        gather_bytes, reduce_bytes: per parameter on the wire.
        overlap_data, overlap_tensor, overlap_pipeline: share of that communication that may run behind computation.
        reduces_to_all: under ZeRO 1 every rank gets the sum of all gradients, as in DDP, and the updated weights are
            gathered behind the update, where nothing hides them (parallel/optimizer_shard.py); else a rank gets its
            part of the sum (1910.02054, section 7.2.1).
        reduces_every_micro_step: sharded gradients are reduced after each micro-step, not after the last.
        keeps_around: of sharded parameters those that stand in no repeated block stay gathered from a forward to the
            end of its backward (FSDP2's root: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_lazy_init`).
        messages: gathers and reductions of one block: one where its parameters travel as one buffer.
        dispatch_seconds: of the host, for one kernel.
        wait_seconds: of the host, at each collective of a block, for each rank of tp beyond the devices of one socket:
            processes do not launch at one time, and a collective begins with the last of them.
        context_bytes: of the driver, the libraries and their communicators, outside the allocator.
        step_bytes: per parameter while the optimizer steps.
        bucket_bytes: in which gradients and weights travel.
        slack: share by which the allocator's blocks exceed the activations that are in use.
        logits_copies: how often a loss that nobody traced holds what it keeps for its backward, at its peak: 3 is
            torch's cross entropy on float32 logits (log-softmax, its gradient, and the gradient of what it picks, 4
            bytes a logit each), 1 a fused one. cut_logits_copies: where tp cuts the logits; 0: as often.
        selective: what recompute="selective" repeats: attention's scores (Megatron-LM) or every second product (torch).
        attention: whose kernels: the vendor's (cuDNN), FlashAttention's or FlashAttention-2's.
        accumulate_bytes: moved per weight when a micro-step's gradient is added to the sum; 0 where the product adds.
        temporary_gradient_bytes: per weight of one product, before that.
        contention: share of the communication behind computation by which computation gets slower.
        sends_once: a token goes to each node once, whatever number of its experts are there (DeepSeek-V3 2412.19437,
            section 3.2.2).
        pipeline_outputs: a stage keeps its outputs until their backward, beside its inputs.
        sequence_parallel: norms and dropouts see 1/tp of the positions (2205.05198, section 4.2.2).
        fixed: what was measured besides kernels and bytes; nothing but on a processor.
        cores: of one process where processes share them: idle ones leave theirs to the others. 1 and more: nobody does.
        stages: what a pipeline's stages have equally much of: "blocks" (Megatron-LM), or multiplied "parameters".
        keeps_gathered_inputs: what tp gathers of the positions for a product stays until its backward (DTensor's
            redistribution), while norms and residuals keep 1/tp; Megatron-LM gathers it again (2205.05198, 4.2.2).
        experts_stay: experts that ep cuts are shared no further, neither they nor their state (parallel/expert.py);
            else the ranks that hold the same ones share them as ZeRO's stage says. experts_apart: by messages of their
            own (parallel/shard.py), else as if all data-parallel ranks moved them with the rest.
        gradients: "resting": they have their memory for the whole run (Megatron-LM, DeepSpeed); "made": each step's
            backward makes them, and the update drops them (torch; DDP's buckets stay).
        scattered_sends: stages send 1/tp of an activation (2104.04473, section 4.1).
        offloaded_share: of a block's activations, where they wait in the host's memory; the engine moves all.
        experts_see_all: each of tp's ranks computes every token of its experts, which are whole and gathered for that;
            else tp cuts the experts or shares the tokens.
        norms_in_float32: in 16 bits, too, as torch's autocast has them: what tp gathers for a product and ep sends to
            an expert, and its gradient, are twice as wide as what comes back.
        copies_tied: logits by the embedding's matrix are made of a copy: where autocast lowers it, and on a pipeline's
            last stage.
        repeats_messages: what cp and ep send in a forward is sent again where that is recomputed, and under "products"
            what tp does; else tp's alone, under recompute="full".
        keeps_received: stages keep memory to receive each of a step's micro-steps into (torch's PipelineStage).
        recomputes_to_last_kept: a forward that recompute="full" repeats ends with the last tensor that the backward
            asks for (torch.utils.checkpoint's early stop); a compiled block is one operation, and runs to its end.
        ring_sum_bytes: of a number in the sums of gradients that go around a ring, at least, until they are at home;
            0: as wide as keys and values, which they go around with.
        known: whether the framework's documents say all this; else it is what such frameworks mostly do.
    """

    name: str = "allranks"
    fused_attention: bool = True
    fusion: float = 1.0
    norm_passes: float = 1.0
    weight_bytes: float = 4.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    gather_bytes: float = 4.0
    reduce_bytes: float = 4.0
    overlap_data: float = 0.9
    overlap_tensor: float = 0.0
    overlap_pipeline: float = 0.0
    reduces_to_all: bool = False
    reduces_every_micro_step: bool = True
    keeps_around: bool = False
    messages: float = 1.0
    dispatch_seconds: float = 8e-6
    wait_seconds: float = 0.0
    context_bytes: float = 2.0e9
    step_bytes: float = 0.0
    bucket_bytes: float = 0.0
    slack: float = 0.12
    logits_copies: float = 3.0
    cut_logits_copies: float = 0.0
    selective: Literal["attention", "products"] = "products"
    attention: AttentionKernel = "flash2"
    accumulate_bytes: float = 12.0
    temporary_gradient_bytes: float = 6.0
    contention: float = 0.0
    pipeline_outputs: bool = True
    sends_once: bool = False
    sequence_parallel: bool = False
    scattered_sends: bool = False
    low_linear: bool = True
    low_dispatch: bool = False
    collective_kernels: float = 4.0
    cast_bytes: float = 0.0
    attention_dropout: bool = False
    experts_inside_tensor: bool = False
    tensor_in_experts: bool = False
    fixed: FixedSeconds = field(default_factory=FixedSeconds)
    cores: float = 1.0
    stages: Literal["blocks", "parameters"] = "blocks"
    keeps_gathered_inputs: bool = False
    experts_stay: bool = False
    experts_apart: bool = False
    gradients: Literal["resting", "made"] = "resting"
    offloaded_share: float = 1.0
    experts_see_all: bool = False
    norms_in_float32: bool = False
    copies_tied: bool = False
    repeats_messages: bool = False
    keeps_received: bool = False
    recomputes_to_last_kept: bool = False
    ring_sum_bytes: float = 0.0
    known: bool = True

    def expert_tensor(self, tp: int) -> int:
        """Ranks that share one expert's matrices, besides ep."""
        return tp if self.tensor_in_experts else 1


LOW = ("bfloat16", "float16")
GATHERED = ("bfloat16", "float8")
"""Precisions under which FSDP gathers in 16 bits by itself (parallel/precision.choose_precision)."""
TORCH_COPIES, TENSOR_COPIES = 3.0, 5.0
"""Of 4 bytes a logit: torch's cross entropy; and DTensor's, which makes it operation by operation
(torch/distributed/tensor/parallel/loss.py): its backward has the logits, their log-softmax, its exponential, the
gradient of what it picks and the result at once."""


def mechanisms_of(choice: Choice) -> Mechanisms:
    """What torch's FSDP2, DDP, DTensor and pipelining do as allranks sets them up (law 7: float32 parameters)."""
    layout = choice.layout
    modes = layout.gather, layout.ddp_hook, layout.compile, layout.fully_sharded, layout.expert_shards == 1
    return _mechanisms(choice.precision, choice.upkeep.state_values, *modes)


@cache
def _mechanisms(
    precision: str,
    state_values: int,
    gather_type: str,
    ddp_hook: str,
    compile_mode: str,
    fully_sharded: bool,
    experts_whole: bool,
) -> Mechanisms:
    lowered = precision != "float32" and precision != "float64"
    wide = 8.0 if precision == "float64" else 4.0
    gather = 2.0 if precision in GATHERED and gather_type != "float32" else wide
    return Mechanisms(
        weight_bytes=wide,
        gradient_bytes=wide,
        optimizer_bytes=state_values * wide,  # train.ema's lie where the optimizer's do (stepping/ema.py)
        gather_bytes=gather,
        reduce_bytes=2.0 if ddp_hook in LOW else wide,
        reduces_to_all=not fully_sharded,
        keeps_around=fully_sharded,
        # Autocast keeps its copies of the weights until the backward, but of those that FSDP gathers in that type.
        cast_bytes=2.0 if lowered and not (fully_sharded and gather == 2.0) else 0.0,
        fusion=0.6 if compile_mode == "block" else 1.0,
        gradients="made",
        stages="parameters",
        keeps_gathered_inputs=True,
        logits_copies=TORCH_COPIES,
        cut_logits_copies=TENSOR_COPIES,
        # FSDP's are counted by the unit; one made in autocast's type takes the place of its weight's copy.
        temporary_gradient_bytes=0.0 if fully_sharded else wide,
        experts_stay=experts_whole,
        experts_apart=True,
        experts_see_all=True,
        norms_in_float32=True,
        copies_tied=True,
        repeats_messages=True,
        keeps_received=True,
        recomputes_to_last_kept=compile_mode != "block",
        ring_sum_bytes=4.0,
    )
