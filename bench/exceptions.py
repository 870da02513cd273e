"""What computes something else than one device by design, beside its own simulation in one process (law 4's table).

    python bench/exceptions.py [--quick] [--json]

A small model with BatchNorm is trained in float64 over several processes, by a loop of one's own over `allranks.join`;
then plain torch plays all ranks in one process, from the same samples. `error` is the largest difference of any
parameter at the end, of that parameter's largest magnitude; `elsewhere` is what the same steps on one device differ
from it by, that is what the choice changes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import left_out
import low_precision
import torch
from replicas import CASES, measure_replicas
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import allranks
from allranks.data.cut import Cut
from allranks.verifying.reference import rankwise_loop

GLOBAL_BATCH, MICRO_STEPS = 9, 3  # over four ranks each micro-step leaves one without a sample
Values = Mapping[str, torch.Tensor]
Make = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    law: str
    error: float
    elsewhere: float


LAWS = {
    "sync": "equal to one device",
    "local": "each rank's samples by themselves, gradients summed",
    "broadcast": "each rank's samples by themselves, gradients summed; running statistics of rank 0",
}
MOVED = "each rank's u and v move in forwards with samples of its own only, gradients summed"


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Signals of 32 values, each of another scale, and a class."""

    draws = False

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(1, 32, generator=generator, dtype=torch.float64) * (1 + index % 5)
        return {"x": x, "y": torch.tensor(index % 3)}


def make_model() -> nn.Module:
    """The same values in every process."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.Tanh(), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(224, 3))


def make_normed() -> nn.Module:
    """The same with spectral norm, whose `u` and `v` each forward moves and reads, in place of BatchNorm."""
    torch.manual_seed(0)
    layers = [spectral_norm(nn.Conv1d(1, 8, 3)), nn.Tanh(), spectral_norm(nn.Conv1d(8, 8, 3)), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(224, 3))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The sum over samples."""
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With momentum, so that every step matters."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(make: Make, layout: str, folder: str, steps: int) -> dict[str, torch.Tensor]:
    """In every process: parameters and buffers at the end."""
    with allranks.join(layout=layout, precision="float64", run=folder) as world:
        module = make()
        model = world.parallelize(module)
        optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9)
        stream = world.stream(Samples(), global_batch=GLOBAL_BATCH, micro_steps=MICRO_STEPS, steps=steps, shuffle=False)
        for batch in stream:
            world.backward(loss_of(model, batch), targets=len(batch["y"]))
            world.step(optimizer)
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def simulate(make: Make, num_ranks: int, steps: int) -> tuple[Values, list[Values]]:
    """Parameters, and each rank's buffers, as one process computes them that plays `num_ranks`."""
    spans = [Cut(GLOBAL_BATCH, num_ranks, micro_steps=MICRO_STEPS).spans(GLOBAL_BATCH, r) for r in range(num_ranks)]
    dataset = Samples()

    def batch_of(first: int, length: int) -> Any:
        items = [dataset[first + at] for at in range(length)]
        return torch.utils.data.default_collate(items) if items else None

    work = []
    for step in range(steps):
        at = step * GLOBAL_BATCH
        micro_steps = [[batch_of(at + own[m][0], own[m][1]) for own in spans] for m in range(MICRO_STEPS)]
        work.append((micro_steps, GLOBAL_BATCH))
    reference, buffers = rankwise_loop(make().double(), make_optimizer, work, loss_of, num_ranks)
    return reference[-1].parameters, list(buffers)


def differ(found: Values, expected: Values) -> float:
    """The largest difference of what both hold, of each one's largest magnitude."""
    pairs = [(found[name].double(), value.double()) for name, value in expected.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) for a, b in pairs)


def measure(mode: str, num_ranks: int, steps: int) -> Row:
    """One mode of BatchNorm over `num_ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = allranks.launch(train, make_model, f"ddp,batchnorm={mode}", f"{folder}/run", steps, nproc=num_ranks)
    alone, own_alone = simulate(make_model, 1, steps)
    parameters, buffers = (alone, own_alone * num_ranks) if mode == "sync" else simulate(make_model, num_ranks, steps)
    if mode == "broadcast":
        buffers = buffers[:1] * num_ranks
    error = max(differ(found, {**parameters, **own}) for found, own in zip(ranks, buffers, strict=True))
    return Row(f"BatchNorm {mode}", LAWS[mode], error, differ(ranks[0], alone))


def measure_normed(num_ranks: int, steps: int) -> Row:
    """Spectral norm over `num_ranks` processes, of which each has micro-steps without a sample."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = allranks.launch(train, make_normed, "ddp", f"{folder}/run", steps, nproc=num_ranks)
    parameters, buffers = simulate(make_normed, num_ranks, steps)
    error = max(differ(found, {**parameters, **own}) for found, own in zip(ranks, buffers, strict=True))
    return Row("spectral norm", MOVED, error, differ(ranks[0], simulate(make_normed, 1, steps)[0]))


def main() -> None:
    """Measures, and prints the table (and with --json one object on standard output)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output, the table on standard error"
    )
    arguments = parser.parse_args()
    num_ranks, steps = 4, 5 if arguments.quick else 20
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{num_ranks} processes, {steps} steps, float64 unless a line says otherwise", file=out)
    print(f"{'':22}{'error':>9}{'elsewhere':>11}  its law", file=out)
    rows = []
    for row in (*(measure(mode, num_ranks, steps) for mode in LAWS), measure_normed(num_ranks, steps)):
        rows.append(row)
        print(f"{row.what:22}{row.error:9.1e}{row.elsewhere:11.1e}  {row.law}", file=out, flush=True)
    for case in CASES:
        row = Row(case.what, case.law, *measure_replicas(case, steps))
        rows.append(row)
        print(f"{row.what:22}{row.error:9.1e}{row.elsewhere:11.1e}  {row.law}", file=out, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run, simulation, alone = left_out.measure_left_out(num_ranks, steps, folder)
    rows.append(Row("optional modules", left_out.LAW, differ(run, simulation), differ(run, alone)))
    print(f"{rows[-1].what:22}{rows[-1].error:9.1e}{rows[-1].elsewhere:11.1e}  {rows[-1].law}", file=out, flush=True)
    for precision, law in low_precision.LAWS.items():
        run, simulation, alone, skipped = low_precision.measure_precision(precision, num_ranks, steps)
        rows.append(Row(precision, law, differ(run, simulation), differ(run, alone)))
        said = f"; {skipped} of {steps} steps were skipped" if skipped else ""
        print(f"{precision:22}{rows[-1].error:9.1e}{rows[-1].elsewhere:11.1e}  {law}{said}", file=out, flush=True)
    if arguments.json:
        print(json.dumps({"ranks": num_ranks, "steps": steps, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
