"""A loop of one's own that reads the same under every layout: `world.run`, and an evaluation with `metrics`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import default_collate

import allranks
from allranks.data.cut import Cut
from allranks.data.stream import DataStream
from allranks.training.door import World
from allranks.verifying.parity import Parts, RecordedStep
from allranks.verifying.reference import ReferenceStep, plain_loop
from tests.distributed.tasks import IGNORED, MODELS, Words
from tests.training.own.cases import Crash, buffers, count, everything, parts, sgd

BATCH = 8


def model_of(kind: str) -> nn.Module:
    """The same values wherever it is built."""
    torch.manual_seed(3)
    return MODELS[kind]()


def words_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """The sum over the words to be found."""
    return nn.functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="sum")


def words_metrics(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
    """The mean loss and the share of words that were found."""
    counted = batch["y"] != IGNORED
    right = (output.argmax(-1) == batch["y"])[counted].sum()
    return {"loss": (words_loss(output, batch), counted.sum()), "accuracy": (right, counted.sum())}


class Recorded(NamedTuple):
    """What one rank has seen: its steps, the losses that `run` returned step by step, and evaluations."""

    steps: list[RecordedStep]
    losses: list[list[float]]
    evaluations: list[dict[str, float]]


def run_loop(folder: str, layout: str, kind: str, max_norm: float | None, **join: Any) -> Recorded:
    """The loop on one rank. Ranks build different models."""
    found = Recorded([], [], [])
    with allranks.join(layout=layout, precision="float64", run=folder, **join) as world:
        model = world.parallelize(model_of(kind) if world.rank == 0 else MODELS[kind]())
        gradients: Parts = {}
        optimizer = world.optimizer(model, sgd)
        optimizer.register_step_pre_hook(lambda *_: gradients.update(parts(world, gradient=True)))
        stream = world.stream(Words(), seed=3, global_batch=BATCH, micro_steps=4)
        found.evaluations.append(evaluated(world))
        losses: list[torch.Tensor] = []
        for batch in stream:
            losses.append(world.run(batch, words_loss, targets=count))
            if world.step(optimizer, max_norm=max_norm):
                found.steps.append(RecordedStep(0.0, 0.0, "", dict(gradients), parts(world), [], [], buffers(world)))
                found.losses.append([float(loss) for loss in losses])
                losses.clear()
        found.evaluations.append(evaluated(world))
    return found


def evaluated(world: World) -> dict[str, float]:
    """Of all samples but some, so that the last batch is short."""
    return world.evaluate(torch.utils.data.Subset(Words(), range(13)), metrics=words_metrics, batch=BATCH)


def plain_words(kind: str, max_norm: float | None, steps: int | None = None) -> tuple[list[ReferenceStep], nn.Module]:
    """The plain loop over the same samples, and the model as it leaves it."""
    dataset, model = Words(), model_of(kind).double()
    order = DataStream(dataset, cut=Cut(BATCH, 1), seed=3, epochs=1 if steps is None else None, steps=steps)
    whole = [
        default_collate([dataset[int(sample)] for sample in plan.samples])
        for step in order.steps()
        for plan in step.micro_plans
    ]
    batches = [(batch, count(batch)) for batch in whole]
    return plain_loop(model, sgd, batches, lambda m, b: words_loss(m(b["x"]), b), max_norm), model


@torch.no_grad()
def plain_metrics(model: nn.Module) -> dict[str, float]:
    """What `evaluated` gives on one device."""
    dataset = Words()
    batch = default_collate([dataset[index] for index in range(13)])
    found = words_metrics(model.eval()(batch["x"]), batch)
    return {name: float(total) / float(number) for name, (total, number) in found.items()}


def resumable(
    folder: str, layout: str, *, crash_after: int | None = None, steps: int = 6
) -> dict[str, torch.Tensor] | None:
    """A loop with AdamW, a scheduler and an average, saved every two steps; this rank's tensors, None after a crash."""
    try:
        with allranks.join(layout=layout, precision="float64", run=folder) as world:
            model = world.parallelize(model_of("transformer"))
            optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
            world.ema(model, decay=0.5)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
            stream = world.stream(Words(), global_batch=BATCH, micro_steps=4, steps=steps)
            world.resume(model, optimizer, stream, scheduler=scheduler)
            for batch in stream:
                world.run(batch, words_loss)
                if world.step(optimizer, max_norm=1.0):
                    scheduler.step()
                world.save(every=2)
                if stream.step == crash_after:
                    raise Crash
            found = everything(world) | {"lr": torch.tensor([group["lr"] for group in optimizer.param_groups])}
            (average,) = world._step.beside
            return found | {entry.name: part.clone() for entry, part in average.parts()}
    except Crash:
        return None


def folder_of(directory: Path, name: str) -> str:
    """A Run directory of its own."""
    return str(directory / name.replace(",", "-").replace("=", ""))
