"""The scale of the loss: when a step is skipped, how the scale moves, what is kept and told of it."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from allranks.stepping import scaler as module
from allranks.stepping.scaler import INITIAL_SCALE, Scaler, skips_on_device
from tests.distributed.pool import Pools

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def judged(norms: list[float]) -> float:
    """In a worker: what all agree on, where each has another norm."""
    rank = torch.distributed.get_rank()
    return float(Scaler(CPU, torch.distributed.group.WORLD).judge(torch.tensor(norms[rank])))


@pytest.mark.distributed
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_one_rank_finds_all_ranks_find(pool: Pools, bad: float) -> None:
    for norms in ([1.0, bad], [bad, 0.0]):
        assert pool(2).run(judged, norms) == [1.0, 1.0]
    assert pool(2).run(judged, [1.0, 3e38]) == [0.0, 0.0]


def test_the_scale_moves_as_torchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROWTH_INTERVAL", 3)
    ours, theirs = Scaler(CPU, None), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step, good in enumerate([True, False, False, True, True, True, True, False, True, True, True]):
        theirs.scale((weight * (1.0 if good else math.inf)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        before = float(ours.scale)
        told = ours.update(ours.judge(torch.tensor(1.0 if good else math.inf)))
        assert float(ours.scale) == theirs.get_scale(), step
        assert told.values()["loss_scale"] == before and ("skipped" in told.values()) is not good
    assert told.values()["skipped_steps"] == 3
    assert float(Scaler(CPU, None).scale) == INITIAL_SCALE == 2**16


def test_what_is_told_stays_as_it_was() -> None:
    scaler = Scaler(CPU, None)
    first = scaler.update(torch.ones(()))
    scaler.update(torch.ones(()))
    assert first.values() == {"loss_scale": 2.0**16, "skipped_steps": 1.0, "skipped": 1.0}


def test_everything_that_moves_is_kept() -> None:
    scaler = Scaler(CPU, None)
    for skipped in (1.0, 0.0, 0.0):
        scaler.update(torch.tensor(skipped))
    kept = {entry.name: float(value) for entry, value in scaler.parts()}
    assert kept == {"scaler.scale": 2.0**15, "scaler.good_steps": 2.0, "scaler.skipped_steps": 1.0}
    assert all(entry.holders == (0,) and entry.shape == () for entry, _ in scaler.parts())


def test_which_optimizers_skip_by_themselves() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(torch.ones(2, device="cuda"))]
    waiting = [nn.Parameter(torch.ones(2))]  # in the host's memory
    fused, plain = torch.optim.AdamW(parameters, fused=True), torch.optim.AdamW(parameters, fused=False)
    assert skips_on_device([fused, torch.optim.Adam(parameters, fused=True)], CUDA)
    assert not skips_on_device([fused], CPU)
    assert not skips_on_device([fused, plain], CUDA)
    assert not skips_on_device([fused, torch.optim.AdamW(waiting, fused=True)], CUDA)
    assert not skips_on_device([torch.optim.SGD(parameters, lr=0.1, fused=True)], CUDA)
