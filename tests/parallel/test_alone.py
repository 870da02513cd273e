"""Modules that a forward may leave out, and inside of which ranks work together: refused, or found after the step."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.stepping.alike import explain_divergence
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import CLASSES, Tiny
from tests.parallel.spreads import spread


class Normed(nn.Module):
    """Two branches with a BatchNorm; every rank enters both, or, once it is said, only the one of its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(5, CLASSES), nn.BatchNorm1d(CLASSES)) for _ in range(2))
        self.parted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for index, branch in enumerate(self.branches):
            if not self.parted or index == dist.get_rank():
                found = found + branch(x)
        return found


NORMED = (
    "LayoutError: hints().optional: a forward may leave out branches.0, and all 2 ranks take the statistics of "
    "branches.0.1 together: say layout.batchnorm=local (or broadcast), or take branches.0 out of hints().optional and "
    "have every forward enter it"
)


def said(build: Any, layout: Layout, **options: Any) -> str:
    """In a worker: the refusal of an optional module."""
    try:
        spread(build, layout, **options)
    except LayoutError as error:
        return f"LayoutError: {error}"
    return ""


def with_experts() -> nn.Module:
    return MoETransformer(7, 1, 8, 2, num_experts=6, top_k=2, max_seq=4)


@pytest.mark.distributed
def test_what_ranks_do_together_inside_of_it_is_refused(pool: Pools) -> None:
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2), Layout(cp=2)):
        assert pool(2).run(functools.partial(said, optional=["branches.*"]), Normed, layout) == [NORMED] * 2
    exchanged = pool(2).run(functools.partial(said, optional=["layers.0"]), with_experts, Layout(dp_replicate=2, ep=2))
    assert all("leave out layers.0, and ep=2 ranks exchange the tokens of layers.0." in one for one in exchanged)
    assert all("together: leave ep out, or take layers.0 out of" in one for one in exchanged)
    whole = pool(2).run(functools.partial(said, optional=["layers.0"]), lambda: Transformer(7, 2, 8, 2), Layout(tp=2))
    assert all("tp=2 cuts activations along the sequence, and each rank would decide" in one for one in whole)


def frozen_norms() -> nn.Module:
    model = Normed()
    for branch in model.branches:
        branch.eval()
    return model


@pytest.mark.distributed
def test_what_ranks_do_alone_is_not(pool: Pools) -> None:
    """Statistics of each rank or none; experts that are whole; tp ranks, whose whole activations are alike."""
    optional = functools.partial(said, optional=["branches.*"])
    for build, layout in (
        (Normed, Layout(dp_replicate=2, batchnorm="local")),
        (Normed, Layout(dp_replicate=2, batchnorm="broadcast")),
        (frozen_norms, Layout(dp_replicate=2)),
        (Normed, Layout(tp=2)),
    ):
        hints = {"tensor": {"branches.0.0": "vocab"}} if layout.tp > 1 else {}
        assert pool(2).run(functools.partial(optional, **hints), build, layout) == [""] * 2
    assert said(Normed, Layout(), optional=["branches.*"]) == ""
    layers = functools.partial(said, optional=["layers.0"])
    assert pool(2).run(layers, with_experts, Layout(dp_replicate=2)) == [""] * 2


class Parting(Tiny):
    def model(self) -> nn.Module:
        return Normed()


def part(layout: str) -> list[str]:
    """In a worker: whether its ranks took each step alike, and what is said of the last."""
    config = config_of(layout, "train.global_batch=8")
    session = session_of(Parting(), config)
    session.spread.expect_unused()  # as where the first samples have left some out
    found = []
    for index, stepped in enumerate(step_through(session, 2)):
        model = session.spread.bare()
        assert isinstance(model, Normed)
        model.parted = True
        pending = stepped.outcome.pending
        found.append(str(pending.read().diverged))
        if index:
            found.append(str(explain_divergence(pending.path, 2, dist.group.WORLD, torch.device("cpu"))))
    return found


@pytest.mark.distributed
def test_statistics_that_were_mixed_are_found_after_the_step(pool: Pools) -> None:
    """No hint, the same number and size of messages: without the path two BatchNorms would learn each other's."""
    words = (
        "in step 2 the ranks ran different modules: rank 0 the statistics of branches.0.1, rank 1 the statistics of "
        "branches.1.1. A synchronised BatchNorm takes its statistics on all ranks together, so these were mixed: "
        "nothing of this step is saved; say layout.batchnorm=local (or broadcast), or have every forward enter it"
    )
    assert pool(2).run(part, "ddp") == [["False", "True", words]] * 2
