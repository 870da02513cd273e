"""What is found: a Verdict with the tensor, the axis and the factor; and the kinds of silent wrongness by number."""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from allranks.verdict import Verdict


class Kind(NamedTuple):
    """A kind of silent wrongness: its name in a few words, and what usually mends it."""

    name: str
    next: str


OTHER: Final = "other"

KINDS: Final[dict[str, Kind]] = {
    "S1": Kind("every epoch has the same order", "call sampler.set_epoch(epoch) at the start of each epoch"),
    "S2": Kind("samples counted twice in an evaluation", "leave out what the sampler pads, or gather by sample number"),
    "S3": Kind("samples left out of an evaluation", "do not drop the last batch there (drop_last=False)"),
    "S4": Kind("ranks are fed the same samples", "give every rank and worker its own part (rank and world size)"),
    "S5": Kind("ranks augment with the same random numbers", "seed what draws in the dataset with the rank as well"),
    "S6": Kind("data ranks drop the same units", "seed the generator with the data rank as well"),
    "S7": Kind("ranks of one layer drop wrongly", "seed by the tp rank in what is cut, and alike in what is whole"),
    "S8": Kind("micro-batches weigh the same whatever they hold", "divide the sums by the targets of the whole step"),
    "S9": Kind("ranks weigh the same whatever they hold", "divide by the targets of all ranks, once"),
    "S10": Kind("the forward went past the wrapper", "call the wrapped model itself, never model.module"),
    "S11": Kind("gradients are not synchronised", "let the last backward of a step run outside of no_sync()"),
    "S12": Kind("the optimizer holds other tensors than the model", "make the optimizer after the model is wrapped"),
    "S13": Kind("the gradient norm is not the whole model's", "reduce the squares over what shards them, once"),
    "S14": Kind("tied tensors are not tied", "tie them again after wrapping, moving and loading"),
    "S15": Kind("whole parameters lack a sum over the ranks that cut", "all-reduce their gradients over that axis"),
    "S16": Kind("axes do not compose", "look at what each axis sums and divides by: once each"),
    "S17": Kind("optimizer, schedule or scaler is not restored", "save and load their state_dict too"),
    "S18": Kind("a load permutes what it puts together", "cut and join each of the packed matrices by itself"),
    "S19": Kind("a load loses part of an uneven shard", "pad nothing away: the last shards are shorter"),
    "S20": Kind("the data goes on from another position", "save the position in samples, and skip to it once"),
    "S21": Kind("random numbers go on otherwise", "save the generators of every rank, or seed each step by its number"),
    "S22": Kind("the learning rate moves at another pace", "step the schedule once an optimizer step, on every rank"),
    "S23": Kind("the learning rate depends on the number of ranks", "scale it nowhere, or say so in one place"),
    "S24": Kind("the global batch depends on the number of ranks", "divide the global batch by the ranks, and add up"),
    "S25": Kind("batch statistics are each rank's own", "synchronise them, and reduce their buffers"),
    "S26": Kind("buffers have another precision", "keep buffers in float32 (buffer_dtype, cast_forward_inputs)"),
    "S27": Kind("what needs float32 is computed in less", "compute it in float32 and cast the result"),
    "S28": Kind("ranks skip different steps", "reduce the finding of infs over all ranks before the step"),
    "S29": Kind("a loss that couples samples sees one rank's", "gather with a gradient what the loss compares"),
    "S30": Kind("what is reported is not the world's", "sum numerators and counts over ranks, and divide once"),
    "S31": Kind("the average follows something else", "average the parameters that the optimizer updates, by name"),
    "S32": Kind("initial values depend on the ranks", "take rank 0's, or seed all alike before building"),
    "S33": Kind("buffers are not set", "compute them after the model has left the meta device"),
    "S34": Kind("a recomputation draws other random numbers", "preserve_rng_state=True in checkpoint()"),
    "S35": Kind("no gradient is taken for a gradient of zero", "give zeros everywhere, or leave it None everywhere"),
    "S36": Kind("experts are divided by the wrong number of ranks", "sum over their holders; divide by all data ranks"),
    "S37": Kind("gradients are added in a low precision", "reduce in float32"),
    "S38": Kind("a setting is not what was asked for", "print what the optimizer has, and pass it on"),
    "S39": Kind("one rank computes otherwise than its twins", "run the step again; take that machine out"),
    "S40": Kind("the resume began somewhere else", "load the newest complete save, and say which"),
    OTHER: Kind("something else is computed", "look at the first tensor that differs"),
}  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """A Verdict on a distributed run, with what programs want to know of it.

    Attributes:
        tensor: logical name of the first tensor that differs, "" where it is none.
        axis: over which ranks it differs: "dp", "tp", ...; "" where that does not matter.
        factor: found divided by expected, in words where it is a number of ranks or micro-batches, else a number;
            "" where no factor fits.
        step: from 0; None before the first and after the last.
        error: the largest difference, relative to the largest expected value; None where there is none.
    """

    verdict: Verdict
    tensor: str = ""
    axis: str = ""
    factor: str | float = ""
    step: int | None = None
    error: float | None = None

    def to_json(self) -> dict[str, object]:
        """kind, tensor, axis, factor, evidence, next, and besides what, name, step and error."""
        kind = self.verdict.kind
        return {
            "kind": kind,
            "tensor": self.tensor,
            "axis": self.axis,
            "factor": self.factor,
            "evidence": list(self.verdict.evidence),
            "next": self.verdict.next,
            "what": self.verdict.what,
            "name": KINDS[kind].name,
            "step": self.step,
            "error": self.error,
        }


def found(
    kind: str,
    what: str,
    *evidence: str,
    tensor: str = "",
    axis: str = "",
    factor: str | float = "",
    step: int | None = None,
    error: float | None = None,
    next: str = "",
) -> Finding:
    """A Finding of one of KINDS; `next` where another than the kind's own helps more. An infinite `error` is none."""
    number = "" if kind == OTHER else f" ({kind}: {KINDS[kind].name})"
    verdict = Verdict(kind, f"{what}{number}", tuple(evidence), next or KINDS[kind].next)
    return Finding(verdict, tensor, axis, factor, step, None if error is None or not math.isfinite(error) else error)
