"""What one micro-step of one block costs on one rank: seconds by cause and bytes kept, after the axes' cuts."""

from dataclasses import dataclass
from typing import Final, NamedTuple, final

from allranks.model_profile import Block, Operation
from allranks.planning.axis_traffic import Axes, AxisTraffic, axis_traffic
from allranks.planning.compute import Machine
from allranks.planning.operation_times import (
    RING_KERNELS,
    Times,
    in_low_precision,
    is_product,
    kept_score_bytes,
    merging_seconds,
    num_kernels,
    operation_times,
    ring_passes,
    share_of,
)
from allranks.planning.repeats import Repeats, repeats_of
from allranks.planning.setting import Setting

CAST = 2.0
"""Bytes of a weight in autocast's type."""


@final
class Parameters(NamedTuple):  # which is made faster than a dataclass: a search makes tens of thousands
    """How many a rank holds, whole before data-parallel sharding: those that tp alone cuts, and experts' beside them;
    of both, those that get gradients.
    """

    dense: float = 0.0
    expert: float = 0.0
    trained: float = 0.0
    trained_expert: float = 0.0


@final
class Around(NamedTuple):
    """What a rank holds in blocks that do not repeat: how many they are, and their parameters."""

    units: int = 0
    parameters: Parameters = Parameters()


NOTHING_AROUND: Final = Around()


@final
@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block, one micro-step, one rank.

    Attributes:
        forward, backward, weight: device seconds of the forward, of the gradients of inputs, and of those of weights.
        again: what recompute repeats of the forward.
        tensor, context, expert: seconds of these axes' collectives in forward and backward and what recompute repeats
            of them, before any overlap; `context_hidden`: those of a ring that are not waited for.
        kernels: that the host starts in a forward; collectives: among them; kernels_again: in what recompute repeats.
        kept_bytes: activations from its forward to its backward; working_bytes: more while its backward runs.
        logits_bytes: what stands beside them where it ends in a loss; kept_logits_bytes: of these until the backward.
        entry_bytes: of its input. parameters, expert_parameters, trained, trained_expert: as in Parameters.
        cast_parameters: of these the ones that products read, which autocast copies into the lower type;
            last_parameters, last_trained: those of the last product, whose gradient is the first to be made.
    """

    forward: float
    backward: float
    weight: float
    again: float
    tensor: float
    context: float
    expert: float
    kernels: float
    kernels_again: float
    collectives: float
    kept_bytes: float
    working_bytes: float
    logits_bytes: float
    entry_bytes: float
    parameters: float
    expert_parameters: float
    tensor_bytes: float
    context_bytes: float
    expert_bytes: float
    cast_parameters: float = 0.0
    last_parameters: float = 0.0
    last_trained: float = 0.0
    trained: float = 0.0
    trained_expert: float = 0.0
    context_hidden: float = 0.0
    kept_logits_bytes: float = 0.0


@final
class _Sums:
    """Over the operations of a block."""

    def __init__(self) -> None:
        self.forward = self.backward = self.weight = self.kernels = 0.0
        self.kept = self.kept_selective = self.logits = self.transient = 0.0
        self.again_full = self.again_selective = 0.0
        self.kernels_full = self.kernels_selective = 0.0
        self.dense = self.expert = self.cast = self.last = self.kept_logits = 0.0
        self.trained = self.trained_expert = self.last_trained = 0.0

    def add(self, operation: Operation, repeats: Repeats, setting: Setting, machine: Machine, experts: int) -> None:
        """One more operation: arithmetic, sums; in 8 bits is kept what NVIDIA's Transformer Engine keeps so."""
        times, share = operation_times(operation, setting, machine, experts), share_of(operation, setting)
        self.forward += times.forward
        self.backward += times.backward
        self.weight += times.weight
        self.again_full += repeats.full * times.forward
        unfused = operation.kind == "attention" and not setting.mechanisms.fused_attention
        kernels = num_kernels(operation, setting)
        self.kernels += kernels
        self.kernels_full += repeats.full * kernels
        tied = _tied_parameters(operation) / share.weights if setting.mechanisms.copies_tied else 0.0
        held = operation.parameters / share.weights + (tied if setting.pp > 1 else 0.0)
        learns = held if operation.trained and not setting.frozen else 0.0
        if operation.cut == "expert":
            self.expert += held
            self.trained_expert += learns
        else:
            self.dense += held
            self.trained += learns
        if is_product(operation):
            self.cast += operation.parameters / share.weights + tied
            self.last, self.last_trained = held, learns
        kept = operation.saved_bytes * setting.micro_batch / share.kept
        if is_product(operation) and in_low_precision(operation, setting):
            kept /= 2  # the operand is kept in 8 bits (Transformer Engine)
        if operation.cut == "expert" and is_product(operation) and setting.casts_experts:
            kept += CAST * held
        if operation.kind == "loss":
            self.logits += _loss_bytes(operation, setting, kept, share.kept)
            self.kept_logits += kept
            return
        if operation.kind == "attention":
            self._ring(merging_seconds(operation, setting, machine), repeats, setting)
        self._transient(operation, setting, learns)
        scores = kept_score_bytes(operation, setting) if unfused else 0.0
        self.kept += kept + scores
        self._selective(operation, repeats, setting, times, kept, unfused)

    def _ring(self, merging: tuple[float, float], repeats: Repeats, setting: Setting) -> None:
        """A ring's own work beside attention (parallel/ring.py): recompute=selective repeats it, but not attention."""
        kernels = RING_KERNELS * ring_passes(setting)
        self.kernels += kernels
        self.kernels_full += repeats.full * kernels
        self.kernels_selective += kernels
        self.forward += merging[0]
        self.backward += merging[1]
        self.again_full += repeats.full * merging[0]
        self.again_selective += merging[0]

    def _transient(self, operation: Operation, setting: Setting, learns: float) -> None:
        """While one product's gradients are made: its output's, its input's, and its weights' before they are added.

        Arithmetic of a product's backward: for Y = X W both X's gradient (Y's times W) and W's (X times Y's) are made
        beside Y's; each is cut as its matrix (1909.08053, section 3).
        """
        if not is_product(operation):
            return
        _, out, into = operation.shape
        share = share_of(operation, setting)
        width = operation.output_bytes / out * setting.micro_batch
        wide = out / (setting.tp if operation.cut in ("column", "vocab") else 1)
        deep = into / (setting.tp if operation.cut == "row" else 1)
        cut = share.kept if operation.cut == "expert" else setting.cp
        made = width * (wide + deep) / cut + learns * setting.mechanisms.temporary_gradient_bytes
        self.transient = max(self.transient, made)

    def _selective(
        self, operation: Operation, repeats: Repeats, setting: Setting, times: Times, kept: float, unfused: bool
    ) -> None:
        """What recompute=selective keeps of an operation, and what it computes again.

        Megatron-LM computes the scores alone again (2205.05198, section 5). torch keeps results (planning/repeats.py).
        """
        if setting.mechanisms.selective == "attention":
            again = float(unfused)
        else:
            again = repeats.selective
            cut = _result_cut(operation, setting) if is_product(operation) else share_of(operation, setting).kept
            kept = repeats.kept * operation.output_bytes * setting.micro_batch / cut
        self.kept_selective += kept
        self.again_selective += again * times.forward
        self.kernels_selective += again * num_kernels(operation, setting)


def _tied_parameters(operation: Operation) -> int:
    """Of the matrix that makes the logits, where it is the embedding's: a pipeline's last stage has a copy of it."""
    tied = operation.cut == "vocab" and is_product(operation) and not operation.parameters
    return operation.shape[1] * operation.shape[2] if tied else 0


def _loss_bytes(operation: Operation, setting: Setting, kept: float, cut: float) -> float:
    """What a loss has at once: as it was traced; of a cross entropy that nobody traced, so often what it keeps.

    How often is `Mechanisms.logits_copies` of the framework (planning/mechanisms.py), with its source there.
    """
    how = setting.mechanisms
    if how.cut_logits_copies and setting.tp > 1 and operation.cut in ("column", "vocab"):
        return kept * how.cut_logits_copies
    if operation.peak_bytes:
        return operation.peak_bytes * setting.micro_batch / cut
    return kept * how.logits_copies


def _result_cut(operation: Operation, setting: Setting) -> float:
    """Over how many ranks a product's result lies: by columns of its matrix (1909.08053, section 3), or by positions
    where tp cuts the sequence between layers (2205.05198, section 4.2.2), and by those that cp cuts in any case.
    """
    if operation.cut in ("column", "vocab"):
        return float(setting.tp * setting.cp)
    return float(setting.cp * (setting.tp if setting.sequence_parallel else 1))


def _entry_cut(block: Block, setting: Setting) -> float:
    """Ranks that share the positions between blocks: where the program cuts them, or the block's own norms say so."""
    along = setting.sequence_parallel or (setting.cuts_positions and any(o.cut == "sequence" for o in block.operations))
    return float(setting.tp if along else 1)


@final
@dataclass(frozen=True, slots=True)
class BlockWork:
    """What a block computes and sends, whatever of it is recomputed; and what it sends `again` where it is."""

    sums: _Sums
    sent: AxisTraffic
    again: AxisTraffic


def block_work(block: Block, setting: Setting, axes: Axes, experts: int) -> BlockWork:
    """Sums over the block's operations; of `setting.recompute` they know nothing."""
    sums = _Sums()
    for operation, repeats in zip(block.operations, repeats_of(block, setting.mechanisms), strict=True):
        sums.add(operation, repeats, setting, axes.machine, experts)
    return BlockWork(sums, *axis_traffic(block, setting, axes))


def block_cost(block: Block, setting: Setting, work: BlockWork) -> BlockCost:
    """That work with what `setting` recomputes, which is repeated and not kept.

    2205.05198, section 5: full keeps each block's input alone; selective repeats attention's scores where they would
    be kept (Megatron-LM), or every second product and what lies between (torch's selective activation checkpoint).
    What of an operation is repeated: planning/repeats.py.
    """
    sums, sent = work.sums, work.sent
    wider = setting.stream_widening(block)
    entry = wider * block.input_bytes * setting.micro_batch / setting.cp / _entry_cut(block, setting)
    recompute = setting.recompute if block.repeated else "none"
    again, kernels_again, kept, working = 0.0, 0.0, sums.kept, sums.transient
    if recompute == "full":
        again, kernels_again = sums.again_full, sums.kernels_full
        kept, working = entry, sums.kept + sums.transient
        sent += work.again
    elif recompute == "selective":
        again, kernels_again, kept = sums.again_selective, sums.kernels_selective, sums.kept_selective
        if setting.mechanisms.selective == "products":
            kept += entry
            if setting.mechanisms.repeats_messages:
                sent += work.again.shown()  # attention itself is kept, and hides nothing
        working += max(0.0, sums.kept - kept)
    return BlockCost(
        forward=sums.forward,
        backward=sums.backward,
        weight=sums.weight,
        again=again,
        tensor=sent.tensor,
        context=sent.context,
        expert=sent.expert,
        kernels=sums.kernels,
        kernels_again=kernels_again,
        collectives=sent.collectives,
        kept_bytes=kept,
        working_bytes=working,
        logits_bytes=sums.logits,
        entry_bytes=entry,
        parameters=sums.dense,
        expert_parameters=sums.expert,
        tensor_bytes=sent.tensor_bytes,
        context_bytes=sent.context_bytes,
        expert_bytes=sent.expert_bytes,
        cast_parameters=sums.cast,
        last_parameters=sums.last,
        last_trained=sums.last_trained,
        trained=sums.trained,
        trained_expert=sums.trained_expert,
        context_hidden=sent.context_hidden,
        kept_logits_bytes=sums.kept_logits,
    )
