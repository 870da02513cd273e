"""float8: every rank scales and rounds its share by itself, gradients are summed in float32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.training.load import load
from allranks.verifying.reference import rankwise_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, config_of, initial_model, parts_of, session_of, step_through, together
from tests.distributed.tasks import IGNORED, Tiny
from tests.training.snapshots import contents_of, find, saver_of

pytest.importorskip("torchao", reason="torchao is not installed: allranks[float8]")
pytestmark = pytest.mark.distributed

STEPS = 4
SGD = ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.weight_decay=0")
COMMON = ("train.global_batch=8", *SGD)
LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
    "optimizer": ("dp_shard=*,sharding=optimizer", 2),
    "recompute": ("fsdp,recompute=full", 2),
    "selective": ("ddp,recompute=selective", 2),
}
# Up to two ranks a sum has one order: to the bit, but for SGD of shards, which is not fused. From three on 1e-7 rounds
# some value the other way in eight bits.
TOLERANCE = {"fsdp": 1e-6, "recompute": 1e-6, "hsdp": 2e-2}


class Wide(Tiny):
    """Blocks of widths that 16 divides, before and after others that it does not."""

    def model(self) -> nn.Module:
        block = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2)]
        return nn.Sequential(nn.Linear(5, 32), *block, nn.Linear(32, 3))


def run(layout: str, precision: str = "float8") -> tuple[Parts, list[list[int]], list[str]]:
    """In a worker: what it holds after some steps, the samples of each, and what was said."""
    session = session_of(Wide(), config_of(layout, *COMMON, precision=precision, steps=STEPS))
    samples = [
        [int(sample) for m in stepped.batch.micro_steps if m.weight for sample in m.samples]
        for stepped in step_through(session, STEPS)
    ]
    return parts_of(session), samples, [str(decision) for decision in session.decisions]


def simulate(samples: Sequence[Sequence[Sequence[int]]]) -> dict[str, torch.Tensor]:
    """The same in one process of torch and torchao; `samples` of each step and rank."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    task = Wide()
    dataset = task.dataset("train")
    model = convert_to_float8_training(
        initial_model(task),
        module_filter_fn=lambda part, _: (part.in_features, part.out_features) == (32, 32),
        config=Float8LinearConfig(emulate=True),
    )
    work = []
    for ranks in samples:
        batches = [default_collate([dataset[sample] for sample in own]) for own in ranks]
        work.append(([batches], sum(int((batch["y"] != IGNORED).sum()) for batch in batches)))

    def forward(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = module(batch["x"])
        return task.loss(output.float(), batch)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)

    return dict(rankwise_loop(model, make, work, forward, len(samples[0]))[0][-1].parameters)


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_what_its_simulation_computes(pool: Pools, name: str) -> None:
    layout, size = LAYOUTS[name]
    ranks = pool(size).run(run, layout)
    found = together([parts for parts, _, _ in ranks])
    (expected,) = pool(1).run(
        simulate, [[own[step] for _, own, _ in ranks] for step in range(STEPS)]
    )  # as many threads
    assert worst(found, expected) <= TOLERANCE.get(name, 0.0)
    low = together([parts for parts, _, _ in pool(size).run(run, layout, "bfloat16")])
    assert worst(low, expected) > 0.05, "the test could not tell it from bfloat16"
    said = [line for line in ranks[0][2] if "float8" in line]
    assert len(said) == 2 and said[0].startswith("warning: float8 takes longer") and said[1].startswith("4 linear")


def halfway(directory: Path) -> Parts:
    session, contents = contents_of(Wide(), config_of("fsdp", *COMMON, precision="float8", steps=STEPS), 2)
    saver_of(session, contents, directory).save(2)
    list(step_through(session, STEPS - 2))
    return parts_of(session)


def resumed(directory: Path) -> Parts:
    session, contents = contents_of(Wide(), config_of("fsdp", *COMMON, precision="float8", steps=STEPS), 0)
    assert contents.load(find(directory, session)) == ()
    list(step_through(session, STEPS - 2))
    return parts_of(session)


def test_a_resumed_run_is_the_uninterrupted_one_and_its_model_is_the_users(pool: Pools, tmp_path: Path) -> None:
    saved = pool(2).run(halfway, tmp_path)
    for own, other in zip(saved, pool(2).run(resumed, tmp_path), strict=True):
        assert all(torch.equal(part, other[name][2]) for name, (_, _, part) in own.items())
    (path,) = tmp_path.glob("step-*")
    model = load(path, Wide())
    assert isinstance(model, nn.Module)
    assert {type(part) for part in model.modules() if isinstance(part, nn.Linear)} == {nn.Linear}
