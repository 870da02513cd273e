"""Setting: one configuration with the mechanisms of the framework that runs it; ours, or a published run's."""

from dataclasses import dataclass, field
from typing import Literal, final

from allranks.model_profile import Block
from allranks.plan import Choice
from allranks.planning.mechanisms import Mechanisms, mechanisms_of
from allranks.upkeep import Upkeep

Recompute = Literal["none", "selective", "full"]


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """Degrees, modes and mechanisms: what `estimate_setting` needs besides profile and cluster.

    Attributes:
        shard: ranks that share a copy's parameters, of the dp * cp that see other samples or positions.
        zero: 0 nothing is shared, 1 the optimizer, 2 gradients too, 3 parameters too (ZeRO 1910.02054).
        chunks: of the model on a pipeline rank.
        schedule: "1f1b", "gpipe", "interleaved", "zb-1p", "zb-2p", ...
        offload: "none", "parameters", "activations", "all".
        keeps_gathered: weights that zero=3 gathers for a forward stay until its backward (FSDP's SHARD_GRAD_OP); where
            `reduces_every_micro_step` is not so, gathered weights and whole gradients stay for the whole step.
        prefetch: weights of how many blocks are gathered ahead of the one that computes.
        upkeep: samples that are read and checkpoints that are saved besides.
        frozen: whether only added low-rank matrices learn (LoRA 2106.09685).
    """

    global_batch: int
    micro_batch: int
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    shard: int = 1
    zero: int = 0
    chunks: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    precision: str = "bfloat16"
    ring: bool = True
    offload: str = "none"
    frozen: bool = False
    keeps_gathered: bool = False
    prefetch: int = 1
    upkeep: Upkeep = field(default_factory=Upkeep, hash=False)
    mechanisms: Mechanisms = field(default_factory=Mechanisms)

    @property
    def micro_steps(self) -> int:
        """Forwards per optimizer step on one data-parallel rank."""
        return max(1, -(-self.global_batch // (self.dp * self.micro_batch)))

    @property
    def world_size(self) -> int:
        """Ranks of the whole run, of which ep is no factor (parallel/mesh.py)."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def lowered(self) -> bool:
        """Whether products are in 16 bits or fewer."""
        return self.precision not in ("float32", "float64")

    @property
    def width(self) -> float:
        """Bytes of a number in an activation: as wide as the precision; 16 bits where products are in fewer."""
        return {"float64": 8.0, "float32": 4.0}.get(self.precision, 2.0)

    @property
    def widening(self) -> int:
        """How many times as wide as `width` a norm's result is."""
        return 2 if self.lowered and self.mechanisms.norms_in_float32 else 1

    def stream_widening(self, block: Block) -> float:
        """The same of what enters `block` and leaves it: autocast leaves embeddings and sums as they are, which are in
        16 bits where their weights are gathered so; experts give back what their norm has made (models/moe.py).

        A trace is of one process, which gathers nothing, and knows what its stream is where weights are gathered so.
        """
        if self.widening == 1:
            return 1.0
        if not block.low_stream:
            return 1.0 if self.mechanisms.cast_bytes else block.low_share
        return 2.0 if self.mechanisms.cast_bytes or block.has_experts else 1.0

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and dropouts are cut by tp."""
        return self.mechanisms.sequence_parallel and self.tp > 1

    @property
    def token_shards(self) -> int:
        """Ranks of tp that share the tokens of an expert, or its matrices."""
        return 1 if self.mechanisms.experts_see_all else self.tp

    @property
    def casts_experts(self) -> bool:
        """Whether every forward casts experts that ep cuts, beside the weights that FSDP gathers in the lower type
        (models/moe.multiply); where autocast copies those, experts are counted among them.
        """
        return self.lowered and self.experts_whole and not self.mechanisms.cast_bytes

    @property
    def expert_shards(self) -> float:
        """Ranks that share one expert's state."""
        if self.experts_whole:
            return 1.0
        least = self.cp if self.ep > 1 and self.mechanisms.experts_apart else 1
        return max(float(least), max(1, self.shard) / self.ep)

    @property
    def experts_whole(self) -> bool:
        """Whether ep cuts experts, and they are shared no further."""
        return self.ep > 1 and self.mechanisms.experts_stay

    @property
    def experts_apart(self) -> bool:
        """Whether those who hold the same experts share them by messages of their own."""
        return self.ep > 1 and self.mechanisms.experts_apart and not self.mechanisms.experts_stay

    @property
    def cuts_positions(self) -> bool:
        """Whether what a norm keeps is cut by tp."""
        how = self.mechanisms  # stages send whole activations, and the engine's blocks take them as they come
        return self.tp > 1 and (how.sequence_parallel or (how.keeps_gathered_inputs and self.pp == 1))


def setting_of(choice: Choice) -> Setting:
    """The Setting that a Choice means."""
    layout = choice.layout
    zero, shard = 0, 1
    if layout.dp_shard > 1:
        zero = {"full": 3, "grad_op": 3, "optimizer": 1, "none": 0}[layout.sharding]
        # `fully_shard` shares among the ranks of a sequence, too (parallel/mesh.py), the optimizer's rows do not.
        shard = layout.dp_shard * (layout.cp if zero == 3 else 1)
    recompute: Recompute = (
        "none" if layout.recompute == "none" else "full" if layout.recompute == "full" else "selective"
    )
    return Setting(
        global_batch=choice.global_batch,
        micro_batch=_samples_of_a_forward(choice),
        dp=layout.dp,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        shard=shard,
        zero=zero,
        chunks=max(choice.chunks, layout.num_stages // layout.pp),
        schedule=layout.schedule,
        recompute=recompute,
        precision=choice.precision,
        ring=layout.context == "ring",
        offload=layout.offload,
        keeps_gathered=zero == 3 and layout.sharding == "grad_op",
        prefetch=layout.prefetch or 1,
        upkeep=choice.upkeep,
        mechanisms=mechanisms_of(choice),
    )


def _samples_of_a_forward(choice: Choice) -> int:
    """Of the forward with the most samples: as many as `micro_batch` where it divides a rank's share (data/cut.py)."""
    steps = -(-choice.global_batch // (choice.layout.dp * choice.micro_batch))
    return -(-choice.global_batch // (steps * choice.layout.dp))
