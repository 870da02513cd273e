"""One device's side of an own loop: judged for what it is before anything is compared with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allranks.surviving.launch import launch
from allranks.verifying.own_alone import MICRO_BATCHES, run_alone, run_shares
from allranks.verifying.own_loop import Setting
from allranks.verifying.program import Program
from allranks.verifying.recording import OneDevice
from allranks.verifying.variants import ORDERED

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


def alone(program: Program, folder: Path, dtype: torch.dtype | None = torch.float64) -> OneDevice:
    one: OneDevice = launch(run_alone, program, Setting(2, dtype, folder=str(folder)), 2, nproc=1)[0]
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


def plain(distributed: bool) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def mean_of_means(model: Any, optimizer: Any, batches: Any) -> None:
    optimizer.zero_grad()
    for x, y in batches:
        (nn.functional.cross_entropy(model(x), y) / len(batches)).backward()
    optimizer.step()


def in_float32(model: Any, optimizer: Any, batches: Any) -> None:
    mean_of_means(model, optimizer, [(x.float(), y) for x, y in batches])


def in_bfloat16(model: Any, optimizer: Any, batches: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        in_float32(model, optimizer, batches)


def with_a_part_in_float32(model: Any, optimizer: Any, batches: Any) -> None:
    mean_of_means(model, optimizer, [(torch.sin(x.float() + model[0].bias[:3].float()).to(x.dtype), y)
                                     for x, y in batches])  # fmt: skip


def over_the_batch(model: Any, optimizer: Any, batches: Any) -> None:
    """A loss that couples the samples of a micro-batch."""
    mean_of_means(model, optimizer, [(x - x.mean(0), y) for x, y in batches])


def uneven(rank: int, world_size: int) -> Any:
    """Two micro-batches of three samples and of one, drawn in the type that tensors have by default."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        yield [(torch.randn(n, 3, generator=generator), torch.arange(n) % 2) for n in (3, 1)]


def unseeded(rank: int, world_size: int) -> Any:
    """From the generator that `build` has seeded."""
    for _ in range(2):
        yield [(torch.randn(n, 3), torch.arange(n) % 2) for n in (3, 1)]


@pytest.mark.parametrize(
    ("program", "data", "dtype", "lowest"),
    [
        (mean_of_means, uneven, torch.float64, torch.float64),
        (mean_of_means, unseeded, torch.float64, torch.float64),
        (with_a_part_in_float32, uneven, torch.float64, torch.float32),
        (in_float32, uneven, None, torch.float32),
        (in_bfloat16, uneven, None, torch.bfloat16),
    ],
)
def test_one_device_takes_micro_batches_as_one_in_every_precision(
    program: Any, data: Any, dtype: Any, lowest: torch.dtype, tmp_path: Path
) -> None:
    """Else a mean of means is on both sides."""
    one = alone(Program(plain, program, data), tmp_path, dtype)
    assert [step.batch_sizes for step in one.run.steps] == [(4,), (4,)] and one.notes == ()
    assert (one.lowest, one.lowered) == (lowest, torch.bfloat16 if lowest is torch.bfloat16 else None)


def test_where_it_keeps_micro_batches_that_is_told(tmp_path: Path) -> None:
    one = alone(Program(plain, over_the_batch, uneven), tmp_path)
    assert [step.batch_sizes for step in one.run.steps] == [(3, 1), (3, 1)] and one.notes == (MICRO_BATCHES,)
    (whole,) = DATA[:1]
    cut = Program(plain, over_the_batch, [whole, whole], micro_batches=2)
    assert alone(cut, tmp_path).notes == (MICRO_BATCHES,)


@pytest.mark.parametrize("data", [uneven, unseeded])
def test_shares_are_of_the_samples_that_the_ranks_have(data: Any, tmp_path: Path) -> None:
    program = Program(plain, mean_of_means, data)
    one = alone(program, tmp_path)
    given = program, Setting(2, folder=str(tmp_path)), 0, one.run, 1
    ((three, single),) = launch(run_shares, *given, nproc=1)[0]
    for name, part in one.run.steps[0].gradients.items():
        assert torch.allclose(0.75 * three[name] + 0.25 * single[name], part.value, rtol=1e-9, atol=1e-12)


def of_pairs(model: Any, optimizer: Any, batches: Any) -> None:
    """Rows beside each other are two views of one thing."""
    optimizer.zero_grad()
    for x, _ in batches:
        z = model(x)
        ((z[0::2] - z[1::2]) ** 2).mean().backward()
    optimizer.step()


def test_where_the_order_of_samples_means_something_rounding_is_seen_in_it(tmp_path: Path) -> None:
    one = alone(Program(plain, of_pairs, DATA), tmp_path)
    assert one.notes == (ORDERED,) and len(one.variants) == 2
    for variant in one.variants:
        off = variant.steps[0].gradients["0.weight"].value - one.run.steps[0].gradients["0.weight"].value
        assert 0 < float(off.abs().max()) < 1e-13
