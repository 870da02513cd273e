"""One device's side of an own loop: judged for what it is before anything is compared with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allranks.surviving.launch import launch
from allranks.verifying.own_alone import run_alone
from allranks.verifying.own_loop import Setting
from allranks.verifying.program import Program
from allranks.verifying.recording import OneDevice

pytestmark = pytest.mark.distributed
DATA = [(torch.arange(12.0).reshape(4, 3) / 7 + step, torch.tensor([0, 1, 0, 1])) for step in range(2)]
GENERATOR = torch.Generator().manual_seed(5)


def build(distributed: bool) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any, batches: Any) -> float:
    optimizer.zero_grad()
    ((x, y),) = batches
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def with_own(model: Any, optimizer: Any, batches: Any) -> float:
    """With a number from a generator that no build makes anew."""
    return step(model, optimizer, [(x + torch.randn(1, generator=GENERATOR), y) for x, y in batches])


def with_bernoulli(model: Any, optimizer: Any, batches: Any) -> float:
    return step(model, optimizer, [(x + torch.bernoulli(torch.full((3,), 0.5)), y) for x, y in batches])


def alone(program: Program, folder: Path) -> OneDevice:
    one: OneDevice = launch(run_alone, program, Setting(2, folder=str(folder)), 2, nproc=1)[0]
    return one


def test_a_loop_with_dropout_is_the_same_again_and_moved_by_rounding_alone(tmp_path: Path) -> None:
    one = alone(Program(build, step, DATA), tmp_path)
    assert one.noise is None and one.run.error == "" and len(one.variants) == 2
    for variant in one.variants:
        off = variant.steps[0].gradients["0.weight"].value - one.run.steps[0].gradients["0.weight"].value
        assert 0 < float(off.abs().max()) < 1e-13


@pytest.mark.parametrize(
    ("program", "seeded", "names"),
    [
        (with_own, False, ("randn with a torch.Generator of its own",)),
        (with_bernoulli, True, ("bernoulli",)),  # and not what dropout draws
    ],
)
def test_what_draws_is_named(program: Any, seeded: bool, names: tuple[str, ...], tmp_path: Path) -> None:
    noise = alone(Program(build, program, DATA), tmp_path).noise
    assert noise is not None and (noise.seeded, noise.operations) == (seeded, names)
    assert noise.difference.startswith("step 0: the gradient of 0.weight differs by")
