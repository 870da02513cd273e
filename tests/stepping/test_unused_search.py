"""What the loss leaves out is found before a wrapper waits for its gradients, and nothing is left behind."""

from typing import Any

import pytest
import torch

from allranks.stepping import start_check
from allranks.stepping.loss_check import FEWEST
from allranks.stepping.passes import Forward
from allranks.stepping.unused_search import search_unused
from allranks.verdict import Decision
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.stepping.halves import SEARCHED, Half

SMALL = ("train.global_batch=6",)


def said(task: Half, layout: str, *overrides: str) -> str | None:
    """Why unused parameters are searched for; None where they are not."""
    session = session_of(task, config_of(layout, *SMALL, *overrides))
    return {decision.what: decision.because for decision in session.decisions}.get(SEARCHED)


def test_alone_nobody_waits_for_an_unused_parameter() -> None:
    assert said(Half(), "single") is None


def check_half(layout: str, overrides: tuple[str, ...]) -> tuple[str | None, bool, bool]:
    """In a worker: why unused parameters are searched for, whether gradients are left, and whether values stayed.

    Then it takes two steps: a parameter that is waited for in vain would fail the second.
    """
    before: dict[str, torch.Tensor] = {}

    def search(forward: Forward, *rest: Any) -> tuple[Decision, ...]:
        spread = forward.spread
        before.update((name, spread.local(name).clone()) for name in spread.map)
        return search_unused(forward, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_check, "search_unused", search)
        session = session_of(Half(), config_of(layout, *SMALL, *overrides))
    because = {decision.what: decision.because for decision in session.decisions}.get(SEARCHED)
    left = any(parameter.grad is not None for parameter in session.spread.trainable().values())
    kept = len(before) == 4 and all(torch.equal(session.spread.local(name), value) for name, value in before.items())
    assert all(one.loss > 0 for one in step_through(session, 2))
    return because, left, kept


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "overrides", "searched"),
    [
        ("ddp", (), True),
        ("ddp", ("layout.static_graph=true",), False),
        ("fsdp", (), False),
        ("dp_replicate=2,dp_shard=2", ("layout.static_graph=true",), True),  # a promise to DDP, which is not there
    ],
)
def test_unused_parameters_under_several_processes(
    pool: Pools, layout: str, overrides: tuple[str, ...], searched: bool
) -> None:
    because = "other.weight, other.bias got none on the first samples" if searched else None
    size = 4 if "," in layout else 2
    assert pool(size).run(check_half, layout, overrides) == [(because, False, True)] * size


@pytest.mark.distributed
def test_what_one_micro_batch_leaves_out_is_found_though_others_use_it(pool: Pools) -> None:
    """Of these samples some are on the side that uses the layer: all at once leave it out, one at a time not all."""
    one_by_one = pool(2).run(said, Half(sometimes=True), "ddp", "train.micro_batch=1")
    assert one_by_one == ["other.weight, other.bias got none on the first samples"] * 2
    x = torch.stack([Half().dataset("train")[index][0] for index in range(FEWEST)])
    assert 0 < int((x[:, 0] < 0).sum()) < FEWEST
