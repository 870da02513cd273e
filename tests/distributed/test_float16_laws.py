"""float16: every rank rounds its share by itself, gradients are summed in float32, and steps are skipped by all."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.verifying.reference import ScaledStep, scaled_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, config_of, initial_model, parts_of, session_of, step_through, together
from tests.distributed.tasks import IGNORED, Points, Tiny, Words
from tests.training.snapshots import contents_of, find, saver_of

pytestmark = pytest.mark.distributed

# A name in it is replaced below, which a type checker would only allow for names that it exports.
optimizer_module: Any = importlib.import_module("allranks.stepping.optimizer")

STEPS = 9
ADAM = ("optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.01")
SGD = ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.weight_decay=0")
COMMON = ("train.global_batch=8", "train.max_norm=0.5", "train.ema=0.5")
LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
    "optimizer": ("dp_shard=*,sharding=optimizer", 2),
    "tp": ("tp=2", 2),
    "pp": ("pp=2", 2),
}
# Up to two ranks a sum has one order: bit by bit. Measured: 1e-7 where gradients are sharded; 5e-4 under tp and pp,
# which round other parts.
TOLERANCE = {"single": 0.0, "ddp": 0.0, "tp": 4e-3, "pp": 4e-3}


def weight_of(sample: int) -> float:
    return 100.0 if sample % 5 == 3 else 1.0


class Heavy(Tiny):
    """Some samples weigh so much that their gradients leave float16 at first: on the rank that has them alone."""

    def dataset(self, split: str) -> Any:
        source = Words() if self.kind == "transformer" else Points()
        return [dict(source[i], weight=torch.tensor(weight_of(i))) for i in range(61)]

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        losses = functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="none")
        found: torch.Tensor = (losses.view(len(batch["y"]), -1) * batch["weight"].unsqueeze(1)).sum()
        return found

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {}


Told = list[tuple[dict[str, float], dict[str, torch.Tensor], list[int]]]


def run(name: str, kind: str, optimizer: Sequence[str], on_device: bool = False) -> tuple[Told, list[Parts]]:
    """In a worker: what each step told of its scale, this rank's averages after it and its samples; all parts."""
    kept = optimizer_module.skips_on_device
    if on_device:
        optimizer_module.skips_on_device = lambda *_: True
    try:
        config = config_of(LAYOUTS[name][0], *COMMON, *optimizer, precision="float16", steps=STEPS)
        session, told, parts = session_of(Heavy(kind=kind), config), [], list[Parts]()
        assert session.ema is not None
        for stepped in step_through(session, STEPS):
            assert stepped.outcome.scaling is not None
            averages = {entry.name: part.clone() for entry, part in session.ema.parts()}
            samples = [int(sample) for m in stepped.batch.micro_steps if m.weight for sample in m.samples]
            told.append((stepped.outcome.scaling.values(), averages, samples))
            parts.append(parts_of(session))
        return told, parts
    finally:
        optimizer_module.skips_on_device = kept


def simulate(kind: str, optimizer: Sequence[str], samples: list[list[list[int]]]) -> list[ScaledStep]:
    """The same in one process of plain torch; `samples` of each step and rank."""
    task = Heavy(kind=kind)
    dataset, model, work = task.dataset("train"), initial_model(task), []
    for ranks in samples:
        batches = [default_collate([dataset[sample] for sample in own]) for own in ranks if own]
        work.append((batches, sum(int((batch["y"] != IGNORED).sum()) for batch in batches)))

    def forward(module: nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(module(batch["x"]).float(), batch)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if optimizer is SGD:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01, fused=True)

    return scaled_loop(model, make, work, forward, max_norm=0.5)


def data_ranks(name: str) -> range:
    return range(0, LAYOUTS[name][1], 2 if name in ("tp", "pp") else 1)


@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_skip_together_and_train_on(pool: Pools, name: str, optimizer: Sequence[str]) -> None:
    kind = "transformer" if name in ("tp", "pp") else "mlp"
    ranks = pool(LAYOUTS[name][1]).run(run, name, kind, optimizer)
    told = [[values for values, _, _ in told] for told, _ in ranks]
    assert all(other == told[0] for other in told)
    samples = [[ranks[rank][0][step][2] for rank in data_ranks(name)] for step in range(STEPS)]
    expected = simulate(kind, optimizer, samples)
    assert [values["loss_scale"] for values in told[0]] == [step.scale for step in expected]
    skips = ["skipped" in values for values in told[0]]
    assert skips == [step.skipped for step in expected]
    assert sum(skips) >= 2 and not all(skips[-3:]), "some steps are skipped, and it goes on"
    alone = [sum(any(weight_of(s) > 1 for s in own) for own in ranks) == 1 for ranks in samples]
    assert any(one and skipped for one, skipped in zip(alone, skips, strict=True)), "one rank has found it"
    assert told[0][-1]["skipped_steps"] == sum(skips)
    for step, wanted in enumerate(expected):
        found = together([parts[step] for _, parts in ranks])
        for key, value in wanted.parameters.items():
            size = value.abs().max()
            if optimizer is SGD or name not in ("tp", "pp"):  # Adam divides noise by eps
                assert (found[key] - value).abs().max() <= TOLERANCE.get(name, 1e-6) * size, (step, key)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "optimizer"])
def test_a_skipped_step_leaves_everything_as_it_was(pool: Pools, name: str) -> None:
    for optimizer in (SGD, ADAM):
        for told, parts in pool(LAYOUTS[name][1]).run(run, name, "mlp", optimizer):
            for step in range(1, STEPS):
                same = all(torch.equal(part, parts[step - 1][key][2]) for key, (_, _, part) in parts[step].items())
                averages = zip(told[step][1].values(), told[step - 1][1].values(), strict=True)
                same_average = all(torch.equal(one, other) for one, other in averages)
                first = parts[step].keys() != parts[step - 1].keys()  # the optimizer's state came with its first step
                assert (same, same_average) == (("skipped" in told[step][0]),) * 2 or first


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "optimizer"])
def test_kernels_that_skip_by_themselves_come_to_the_same(pool: Pools, name: str) -> None:
    host, device = (pool(LAYOUTS[name][1]).run(run, name, "mlp", ADAM, on_device) for on_device in (False, True))
    for (told, parts), (others, other_parts) in zip(host, device, strict=True):
        assert [values for values, _, _ in told] == [values for values, _, _ in others]
        assert all(torch.equal(part, other_parts[-1][key][2]) for key, (_, _, part) in parts[-1].items())


def halfway(directory: Path, layout: str) -> None:
    """In a worker: three steps and a checkpoint."""
    config = config_of(layout, *COMMON, *ADAM, precision="float16", steps=STEPS)
    session, contents = contents_of(Heavy(), config, 3)
    saver_of(session, contents, directory).save(3)


def go_on(directory: Path | None, layout: str) -> tuple[list[dict[str, float]], Parts]:
    """In a worker: the steps after the third, from that checkpoint or (None) from the beginning; what is held then."""
    config = config_of(layout, *COMMON, *ADAM, precision="float16", steps=STEPS)
    session, contents = contents_of(Heavy(), config, 0 if directory is not None else 3)
    if directory is not None:
        assert contents.load(find(directory, session)) == ()
    told = [s.outcome.scaling.values() for s in step_through(session, STEPS - 3) if s.outcome.scaling is not None]
    return told, parts_of(session)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_scale_goes_on_where_it_stood(pool: Pools, tmp_path: Path, name: str) -> None:
    layout, size = LAYOUTS[name]
    pool(size).run(halfway, tmp_path, layout)
    for (told, parts), (expected, whole) in zip(
        pool(size).run(go_on, tmp_path, layout), pool(size).run(go_on, None, layout), strict=True
    ):
        assert told == expected and told[0]["loss_scale"] < 2**16
        assert all(torch.equal(part, whole[key][2]) for key, (_, _, part) in parts.items())
    ((elsewhere, _),) = pool(1).run(go_on, tmp_path, "single")
    assert elsewhere == expected
