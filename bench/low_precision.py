"""The lines of law 4's table that are precisions: what `bench/exceptions.py` measures of float16, bfloat16 and float8.

A small model is trained by `allranks train`'s own session over several processes, then by plain torch in one process
that rounds each rank's share by itself: torch's autocast, for float16 torch's GradScaler, and for float8 torchao.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import default_collate

import allranks
from allranks.config import resolve_config
from allranks.data.micro_step import StepBatch
from allranks.data.random_keys import seed_all
from allranks.launching.environment import read_environment
from allranks.layout import Layout
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import choose_device, start, stop
from allranks.stepping.session import assemble
from allranks.stepping.world import gather_processes
from allranks.task import Task
from allranks.verifying.reference import plain_loop, rankwise_loop, scaled_loop

GLOBAL_BATCH, LR = 12, 0.001
GATHER = "bfloat16 gather"
LAWS = {
    "float16": "each rank's share in float16, gradients summed in float32, torch's GradScaler",
    "bfloat16": "each rank's share in bfloat16, gradients summed in float32",
    GATHER: "the same under fsdp with layout.gather=bfloat16: weights and a rank's gradients rounded to bfloat16",
} | (
    {"float8": "the same, and products of linear layers in float8, scaled by each rank's share (torchao, emulated)"}
    if find_spec("torchao")
    else {}
)
Values = dict[str, torch.Tensor]


class Signals(Task):
    """A class for each of 512 rows of 32 values; one row in 17 weighs 100 times as much, and overflows float16."""

    def dataset(self, split: str) -> Any:
        rows = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))
        return [{"x": row, "y": index % 5, "w": 100.0 if index % 17 == 3 else 1.0} for index, row in enumerate(rows)]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)
        )

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        losses: torch.Tensor = functional.cross_entropy(output, batch["y"], reduction="none") * batch["w"]
        return losses.sum()


def train(precision: str, steps: int) -> tuple[Values, int, list[list[int]]]:
    """In every process: parameters at the end, steps that were skipped, and its samples in each step."""
    given = (
        f"train.steps={steps}",
        f"train.global_batch={GLOBAL_BATCH}",
        f"train.precision={precision.partition(' ')[0]}",
    )
    layout, gather = ("fsdp", ["layout.gather=bfloat16"]) if precision == GATHER else ("ddp", [])
    sgd = ("optimizer.name=sgd", f"optimizer.lr={LR}", "optimizer.momentum=0.9", "optimizer.weight_decay=0")
    config = resolve_config(task_defaults={}, toml=None, overrides=[*given, *gather, *sgd], layout=layout)
    environment = read_environment(os.environ)
    choice = choose_device(environment, "cpu", "gloo")
    start(environment, choice, timeout_seconds=600)
    try:
        processes = gather_processes(environment, choice, Layout.resolve(config.layout, environment.world_size))
        session = assemble(Signals(), config, processes, Stopwatch(), lambda: (False, False))
        samples, skipped = [], 0.0
        with session.loader() as loader:
            batch: StepBatch | None = next(loader)
            assert batch is not None
            before = session.step.agree_first(batch)
            while batch is not None:
                outcome = session.step.run(batch, before, lambda: next(loader, None))
                session.stream.take(batch)
                samples.append([int(sample) for m in batch.micro_steps if m.weight for sample in m.samples])
                skipped = 0.0 if outcome.scaling is None else outcome.scaling.values()["skipped_steps"]
                before, batch = outcome.pending, outcome.upcoming
        return {name: _whole(tensor) for name, tensor in session.spread.tensors.items()}, int(skipped), samples
    finally:
        stop()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def in_float8(model: nn.Module) -> nn.Module:
    """Its layers of fitting widths by torchao itself."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    found: nn.Module = convert_to_float8_training(
        model,
        module_filter_fn=lambda part, _: part.in_features % 16 == 0 and part.out_features % 16 == 0,
        config=Float8LinearConfig(emulate=True),
    )
    return found


def measure_precision(precision: str, num_ranks: int, steps: int) -> tuple[Values, Values, Values, int]:
    """Parameters of rank 0 at the end, those of the simulation, of one device in float32, and the steps skipped."""
    ranks = allranks.launch(train, precision, steps, nproc=num_ranks)
    task, lowered = Signals(), torch.float16 if precision == "float16" else torch.bfloat16
    dataset = task.dataset("train")
    fed = [[default_collate([dataset[s] for s in own[step]]) for _, _, own in ranks] for step in range(steps)]

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9, fused=True)

    def model() -> nn.Module:
        seed_all(0)
        return task.model()

    def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(module(batch["x"]).float(), batch)

    def lowered_loss(module: nn.Module, batch: Any) -> torch.Tensor:
        weights: dict[str, torch.Tensor] = dict(module.named_parameters())
        if precision == GATHER:
            weights = {name: weight.bfloat16() for name, weight in weights.items()}
        with torch.autocast("cpu", lowered):
            output = torch.func.functional_call(module, weights, (batch["x"],))
        return task.loss(output.float(), batch)

    if precision == "float16":
        found = scaled_loop(model(), make, [(batches, GLOBAL_BATCH) for batches in fed], loss_of)[-1].parameters
    else:
        work = [([batches], GLOBAL_BATCH) for batches in fed]
        copy = in_float8(model()) if precision == "float8" else model()
        found = rankwise_loop(copy, make, work, lowered_loss, num_ranks)[0][-1].parameters
    whole = [({key: torch.cat([b[key] for b in batches]) for key in batches[0]}, GLOBAL_BATCH) for batches in fed]
    alone = plain_loop(model(), make, whole, loss_of)[-1].parameters
    return ranks[0][0], found, alone, ranks[0][1]
