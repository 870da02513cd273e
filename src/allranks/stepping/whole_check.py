"""Does the cut model compute what the whole one does? Asked once, at the start, where layers themselves are cut.

Ordinary code between cut layers may look at whole tensors: it splits channels by a number of heads that it keeps, or
normalises over what is now a part. Nothing raises, and the run merely learns something else. So rank 0 builds the model
once more, uncut, and loss and gradients of a few samples are compared: a small `verify`, before the first step. Both
have the same noise on their parameters meanwhile, because what begins at zero would hide what lies behind it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from allranks.data.random_keys import seed_all
from allranks.errors import LayoutError
from allranks.parallel.pipeline import Payload
from allranks.parallel.stage_transport import signature_of
from allranks.parallel.whole import WholeGradients, whole_gradients
from allranks.stepping.loss_check import generators_kept
from allranks.stepping.passes import Forward, buffers_kept
from allranks.units import format_count
from allranks.verdict import Decision

LARGEST_FLOPS = 2e12  # of the comparison on one core: some ten seconds to a minute
NUM_SAMPLES = 2

# What sums in another order leave between two norms. What is wrong by a factor, or a head too wide, is far beyond.
_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 6e-2}
_OF_LARGEST = 1e-3
# A router may send a token elsewhere for a rounding; a gradient that is wrong by a factor is still beyond this.
_ROUTED = 0.1


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
    layout, samples = forward.spread.mesh.layout, list(samples)[:NUM_SAMPLES]
    needed = (flops_per_sample or 0.0) * len(samples)
    if needed > LARGEST_FLOPS:
        what = "the cut model was not compared with the whole one"
        return Decision(what, f"one process would need {format_count(needed)} floating-point operations for that")
    batch = forward.task.collate(samples)
    with forward.spread.shaken():
        found = _spread_gradients(forward, batch)
    told = torch.zeros(3, dtype=torch.float64)
    if forward.spread.mesh.rank == 0:
        told = torch.tensor(_worst(found, _whole(forward, batch, seed), _tolerance(forward)), dtype=torch.float64)
    told = told.to(forward.spread.device)
    dist.broadcast(told, 0)
    index, mine, whole = told.tolist()
    if index >= 0:
        name = ["the loss", *(f"the gradient of {name}" for name in found.norms)][int(index)]
        raise LayoutError(
            f"layout {layout} does not compute what one process computes: {name} is {mine:.6g}, and {whole:.6g} for "
            "the whole model. Code between the cut layers looks at whole tensors (a number of heads, a norm over all "
            "channels), or a module there needs a rule: name what to cut, and what is part or replicate, in "
            "hints().tensor"
        )
    what = "the cut model computes what the whole one does"
    return Decision(what, f"loss and {len(found.norms)} gradients of {len(samples)} samples agree")


def _tolerance(forward: Forward) -> float:
    dtype = forward.spread.precision.compute or forward.spread.precision.parameters
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


def _whole(forward: Forward, batch: Any, seed: int) -> WholeGradients:
    task, precision = forward.task, forward.spread.precision
    placed = precision.cast_inputs(batch)

    def loss_of(module: torch.nn.Module) -> torch.Tensor:
        arguments = forward.inputs(placed)
        with precision.autocast("cpu"):
            output = module(**arguments) if isinstance(arguments, Mapping) else module(*arguments)
        return task.loss(precision.cast_output(output), placed)

    with generators_kept(forward.spread.bare()), torch.enable_grad():
        return whole_gradients(task.model, precision, partial(seed_all, seed), loss_of)


def _spread_gradients(forward: Forward, batch: Any) -> WholeGradients:
    """Loss, and norms over the world; every data rank sees these samples, so their mean is what each has."""
    spread = forward.spread
    module = spread.bare()
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    spread.synchronise(last=True)
    try:
        with generators_kept(module), buffers_kept(spread, unless=False), torch.enable_grad():
            loss = _backward(forward, forward.place(batch), module)
    finally:
        for part, training in modes:
            part.training = training
    spread.reduce_scalars()
    names = spread.trainable_names
    # Each of those that hold a part brings its share of the square, and one of those that have the loss brings that.
    nothing = torch.zeros((), dtype=torch.float64, device=spread.device)
    squares = [spread.square_of_gradient(name) if name in spread.map else nothing for name in names]
    tells = spread.mesh.counts and spread.mesh.dp_rank == 0
    told = torch.stack([*squares, loss.detach().double() if tells else nothing])
    for parameter in spread.trainable().values():
        parameter.grad = None
    spread.reshard()
    dist.all_reduce(told)
    *norms, _ = told.sqrt().tolist()
    return WholeGradients(float(told[-1]), dict(zip(names, norms, strict=True)))


def _backward(forward: Forward, placed: Any, module: torch.nn.Module) -> torch.Tensor:
    """The loss, where this rank has it, else zero; its gradients are on the parameters."""
    spread, loss = forward.spread, torch.zeros((), device=forward.spread.device)
    if spread.stages is None:
        output = spread.precision.cast_output(forward.raw(placed, module))
        loss = forward.task.loss(output, placed)
        loss.backward()
        return loss

    def compute(index: int, stage: int, received: Payload) -> Payload:
        nonlocal loss
        output: Payload = forward.run_stage(placed, stage, received)
        if stage < pipeline.last:
            return output
        loss = forward.task.loss(output, placed)
        return (loss,)

    pipeline = spread.stages.pipeline
    spread.stages.scheduler.run([signature_of(forward.inputs(placed))], compute)
    spread.stages.reduce_shared()
    return loss
