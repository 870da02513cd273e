"""Does the cut model compute what the whole one does? Asked once, at the start, where layers themselves are cut.

Ordinary code between cut layers may look at whole tensors: it splits channels by a number of heads that it keeps, or
normalises over what is now a part. Nothing raises, and the run merely learns something else. So rank 0 builds the model
once more, uncut, and loss and gradients of a few samples are compared: a small `verify`, before the first step. Both
have the same noise on their parameters meanwhile, because what begins at zero would hide what lies behind it, and what
torch draws in them is fixed (fixed_draws.py): the cut one draws others. Where python or numpy draws, it is said.

A model too large for that is refused where a stage of a pipeline was seen to use what only another one has.

Where sequences are cut, their parts are compared with the whole: a model that has to know its positions is found in
this way. A loss that looks at several of them is found before, whatever the model's size (sequence_loss.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import generators_kept, seed_all
from allranks.errors import LayoutError
from allranks.parallel.spread import Spread, is_gpu
from allranks.parallel.stage_run import Payload
from allranks.parallel.stage_transport import signature_of
from allranks.parallel.whole import WholeGradients, float32_products, square_of, whole_gradients
from allranks.stepping.evaluation_mode import evaluation_mode
from allranks.stepping.fixed_draws import FixedDraws
from allranks.stepping.passes import Forward, buffers_kept
from allranks.stepping.randomness import plain_digests
from allranks.stepping.sequence_loss import advise_loss
from allranks.stepping.uncompared import BESIDE, find_wrong, pass_uncompared, refuse_use
from allranks.units import format_count
from allranks.verdict import Decision
from allranks.vocabulary import whole_logits

LARGEST_FLOPS = 2e12  # of the comparison on one core: some ten seconds to a minute
LARGEST_UNCOUNTED = 1e8  # parameters, where what they compute could not be counted
UNABLE = -2.0  # in place of a place: rank 0 could not run the whole model
DRAWN = -3.0  # the models differ, and draw numbers that are not fixed
NUM_SAMPLES = 2

_UNSEEN = "The forward uses something beside its blocks that another stage has"

# What sums in another order leave between two norms. What is wrong by a factor, or a head too wide, is far beyond.
_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 6e-2}
_OF_LARGEST = 1e-3
# A router may send a token elsewhere for a rounding; a gradient that is wrong by a factor is still beyond this.
_ROUTED = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """What is compared.

    Attributes:
        what: a name for the batch.
        value: what the loss is called, where it is another one.
        strict: whether an error of the whole model is raised, where the run's devices are processors, too.
        lowest: the type in which the forward computes by its own code, where it is a lower one.
    """

    what: str
    value: str = "loss"
    strict: bool = True
    lowest: torch.dtype | None = None


def check_whole(forward: Forward, samples: Sequence[Any], seed: int, flops_per_sample: float | None) -> Decision:
    """Compare with one process; collective over the world, every rank with the same samples.

    The model's initial values have to stand in it still.

    Args:
        samples: not collated; the first two are taken.
        seed: of the model.
        flops_per_sample: of a forward and a backward of the whole model; None where they could not be counted.

    Raises:
        LayoutError: on every rank, naming the parameter whose gradient differs most.
    """
    samples = list(samples)[:NUM_SAMPLES]
    flops = None if flops_per_sample is None else flops_per_sample * len(samples)
    batch = plain_batch(forward.task.collate(samples))
    return compare_whole(forward, batch, seed, flops, Asked(f"{len(samples)} samples"))


def compare_whole(forward: Forward, batch: Any, seed: int, flops: float | None, asked: Asked) -> Decision:
    """The same on a batch; `flops` of a forward and a backward on it; collective likewise."""
    layout, device = forward.spread.mesh.layout, forward.spread.device
    if flops is None:  # a small model is soon run, whatever it computes
        parameters = sum(math.prod(entry.shape) for entry in forward.spread.map.values())
        flops = math.inf if parameters > LARGEST_UNCOUNTED else 0.0
    counted = torch.tensor(flops, dtype=torch.float64, device=device)
    dist.broadcast(counted, 0)  # layers that do not divide evenly count otherwise on each rank: one decides for all
    flops = counted.item()
    if flops > LARGEST_FLOPS:
        because = f"one process would need {format_count(flops)} floating-point operations for that"
        if flops == math.inf:
            because = "what one process would need for that could not be counted, and the model is large"
        return pass_uncompared(forward.spread, because)
    with forward.spread.shaken(), float32_products(device):
        found = _spread_gradients(forward, batch, seed)
    told, because = torch.zeros(7, dtype=torch.float64), "rank 0's processor cannot run the whole model"
    if forward.spread.mesh.rank == 0:
        whole, relative = _try_whole(forward, batch, seed, strict=asked.strict), _tolerance(forward, asked.lowest)
        if isinstance(whole, str):
            because, told[0] = f"{because} ({whole})", UNABLE
        else:
            both = found.loss, whole.loss, found.output, whole.output
            told = torch.tensor((*_worst(found, whole, relative), *both), dtype=torch.float64)
            if whole.draws and told[0] >= 0:
                told[0] = DRAWN
    told = told.to(device)
    dist.broadcast(told, 0)
    index, mine, expected, *pairs = told.tolist()
    if index == UNABLE:
        return pass_uncompared(forward.spread, because)
    if index == DRAWN:
        return pass_uncompared(forward.spread, "it draws from python's or numpy's random numbers, other ones where cut")
    if index >= 0:
        name = [f"the {asked.value}", *(f"the gradient of {name}" for name in found.norms)][int(index)]
        relative = _tolerance(forward, asked.lowest)
        same_loss, same_output = (abs(a - b) <= relative * abs(b) for a, b in (pairs[:2], pairs[2:]))
        if layout.cp > 1 and same_output and not same_loss:
            name, (mine, expected) = "the loss", pairs[:2]
        differs = f"{name} is {mine:.6g}, and {expected:.6g} for the whole model"
        refuse_use(forward.spread, differs)
        raise LayoutError(
            f"layout {layout} does not compute what one process computes: {differs}. "
            f"{_advise(forward.spread, same_loss=same_loss, same_output=same_output)}"
        )
    because = f"{asked.value} and {len(found.norms)} gradients of {asked.what} agree"
    return Decision("the cut model computes what the whole one does", because)


def _advise(spread: Spread, *, same_loss: bool, same_output: bool) -> str:
    """What may be the cause, and what to do; collective along pp."""
    layout, wrong = spread.mesh.layout, find_wrong(spread)
    if wrong or (layout.pp > 1 and layout.tp == layout.cp == 1):
        return f"{wrong or _UNSEEN}. {BESIDE}"
    if layout.cp == 1 or (layout.tp > 1 and same_loss and same_output):
        return (
            "Code between the cut layers looks at whole tensors (a number of heads, a norm over all channels), or a "
            "module there needs a rule: name what to cut, and what is part or replicate, in hints().tensor, or in a "
            "loop of your own in world.parallelize(tensor=)"
        )
    if same_output and not same_loss:
        return f"Its outputs agree, so that {advise_loss(layout.cp)}"
    return (
        f"With cp={layout.cp} forward gets a part of each sequence: what depends on positions needs the argument "
        "`positions` (or position_ids), which allranks fills; attention has to call "
        "torch.nn.functional.scaled_dot_product_attention; and all else must look at each position by itself"
    )


def _tolerance(forward: Forward, lowest: torch.dtype | None) -> float:
    dtype = lowest or forward.spread.precision.compute or forward.spread.precision.parameters
    routed = forward.spread.experts is not None and dtype is not torch.float64
    return max(_RELATIVE[dtype], _ROUTED) if routed else _RELATIVE[dtype]


def _worst(found: WholeGradients, whole: WholeGradients, relative: float) -> tuple[float, float, float]:
    """(place, found, expected) of the largest difference beyond the tolerance; a place of -1 where there is none."""
    floor = _OF_LARGEST * max(whole.norms.values(), default=0.0)
    pairs = [(found.loss, whole.loss, abs(whole.loss))]
    pairs += [(found.norms[name], norm, max(norm, floor)) for name, norm in whole.norms.items()]
    errors = [abs(mine - norm) / (relative * size) if size else float(mine != norm) * 2 for mine, norm, size in pairs]
    # What is no number is no agreement.
    errors = [math.inf if math.isnan(error) else error for error in errors]
    largest = max(range(len(errors)), key=errors.__getitem__)
    return (float(largest), *pairs[largest][:2]) if errors[largest] > 1 else (-1.0, 0.0, 0.0)


def _try_whole(forward: Forward, batch: Any, seed: int, *, strict: bool = True) -> WholeGradients | str:
    """What one process computes; or why a processor cannot, where the run's devices are others.

    What is made for GPUs alone (FlexAttention's backward, a kernel in Triton, a loss that has a tensor there) is no
    mistake of a layout, and the other ranks wait for what is said of it.
    """
    try:
        return _whole(forward, batch, seed)
    except Exception as error:
        if strict and not is_gpu(forward.spread.device):
            raise
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _whole(forward: Forward, batch: Any, seed: int) -> WholeGradients:
    task, precision = forward.task, forward.spread.precision
    # That of a loop lies where the ranks compute.
    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), batch)
    placed, seen = precision.cast_inputs(batch), list[tuple[torch.Tensor, bool]]()

    def loss_of(module: torch.nn.Module) -> torch.Tensor:
        seed_all(seed)
        before, arguments = plain_digests(), forward.inputs(placed)
        with precision.autocast("cpu"):
            output = forward.call(module, arguments)
        square, loss = square_of(output), task.loss(precision.cast_output(output), placed)
        seen.append((square, plain_digests() != before))
        return loss

    with generators_kept(forward.spread.bare()), torch.enable_grad():
        found = whole_gradients(task.model, precision, partial(seed_all, seed), loss_of, FixedDraws())
    return replace(found, output=math.sqrt(seen[0][0]), draws=seen[0][1])


def _spread_gradients(forward: Forward, batch: Any, seed: int) -> WholeGradients:
    """Loss, and norms over the world; every data rank sees these samples, so their mean is what each has.

    Of a sequence that is cut each rank has a part of the loss: it counts as often as the mean divides it.
    """
    spread = forward.spread
    # DDP has nothing to do where all its ranks have the same; it sums what several parts of a sequence have.
    module = spread.bare() if spread.context is None else spread.modules[""]
    spread.synchronise(last=True)
    kept = generators_kept(module), buffers_kept(spread, unless=False)
    with evaluation_mode((module,)), kept[0], kept[1], torch.enable_grad(), FixedDraws():
        loss, square = _backward(forward, forward.place(batch), module, seed)
    spread.reduce_scalars()
    names = spread.trainable_names
    # Each of those that hold a part brings its share of the square, and one of those that have the loss brings that.
    nothing = torch.zeros((), dtype=torch.float64, device=spread.device)
    squares = [spread.square_of_gradient(name) if name in spread.map else nothing for name in names]
    tells = spread.mesh.adds_loss and spread.mesh.dp_rank == 0
    told = torch.stack([*squares, *(part.to(spread.device) if tells else nothing for part in (loss, square))])
    for parameter in spread.trainable().values():
        parameter.grad = None
    spread.reshard()
    dist.all_reduce(told)
    *norms, _, square = told.sqrt().tolist()
    return WholeGradients(float(told[-2]), dict(zip(names, norms, strict=True)), square)


def _backward(forward: Forward, placed: Any, module: torch.nn.Module, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the square of the output, where this rank has them, else zeros; gradients are on the parameters.

    DDP and FSDP2 take the mean over the ranks of a sequence, each of which has the loss of its positions.
    """
    spread, nothing = forward.spread, torch.zeros((), dtype=torch.float64)
    cp = spread.mesh.layout.cp
    seed_all(seed)
    if spread.stages is None:
        output = spread.precision.cast_output(forward.raw(placed, module))
        loss = forward.task.loss(output, placed)
        if loss.requires_grad:
            (loss * cp).backward()
        return loss.detach().double(), square_of(whole_logits(output))
    found = [(nothing, nothing)]

    def compute(index: int, stage: int, received: Payload) -> Payload:
        seed_all(seed)
        output: Any = forward.run_stage(placed, stage, received)
        if stage < pipeline.last:
            sent: Payload = output
            return sent
        loss = forward.task.loss(output, placed)
        found.append((loss.detach().double(), square_of(whole_logits(output))))
        return (loss * cp,)

    pipeline = spread.stages.pipeline
    spread.stages.scheduler.run([signature_of(forward.inputs(placed), spread.bare())], compute, scheduled=False)
    spread.reduce_replicated()
    spread.stages.reduce_shared()
    return found[-1]
