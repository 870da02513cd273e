"""Optimizers that no longer hold what the model computes with are found, on whichever rank."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.parallel import compiled
from allranks.stepping.linkage import Linkage
from allranks.stepping.session import Session
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny
from tests.stepping.rounds import hold_round


def trained(kind: str = "mlp", layout: str = "single", *overrides: str) -> Session:
    session = session_of(Tiny(kind=kind), config_of(layout, "train.global_batch=8", *overrides))
    for _ in step_through(session, 2):
        pass
    return session


def body(session: Session) -> Any:
    return session.spread.bare()


def replaced(session: Session) -> None:
    body(session)[0].weight = nn.Parameter(torch.zeros_like(body(session)[0].weight))


def made_anew(session: Session) -> None:
    layer = body(session)[0]
    body(session)[0] = nn.Linear(layer.in_features, layer.out_features)


def grown(session: Session) -> None:
    body(session).add_module("adapter", nn.Linear(2, 2))


def taken_away(session: Session) -> None:
    del body(session)[0].weight
    body(session)[0].weight = torch.zeros(1)


def copied(session: Session) -> None:
    group = session.optimizers.by_name[""].param_groups[0]
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


def left_out(session: Session) -> None:
    session.optimizers.by_name[""].param_groups[0]["params"].pop()


def misshapen(session: Session) -> None:
    optimizer = session.optimizers.by_name[""]
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (replaced, "the model has another tensor for 0.weight than the one that is updated"),
        (made_anew, "the model has another tensor for 0.weight than the one that is updated"),
        (grown, "the model has a new parameter adapter.weight, which no optimizer has"),
        (taken_away, "the model no longer has the parameter 0.weight, which is still updated"),
        (copied, "AdamW holds a tensor of shape"),
        (left_out, "no optimizer holds 6.bias any more"),
        (misshapen, "AdamW keeps exp_avg of 0.weight in the shape (3,), and not"),
    ],
)
def test_what_has_parted_is_named(mistake: Callable[[Session], None], said: str) -> None:
    session = trained()
    assert hold_round(session, 2) == {}
    mistake(session)
    verdict = hold_round(session, 2)["linkage"]
    assert verdict.kind == "optimizer_unlinked"
    assert verdict.what.startswith(f"step 2: optimizers and model have parted on rank 0: {said}"), verdict.what


def test_what_is_thawed_has_no_optimizer() -> None:
    session = trained("frozen")
    assert hold_round(session, 2) == {}
    for parameter in body(session).parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    assert "asks for gradients now, but was frozen at the start" in hold_round(session, 2)["linkage"].what


def test_values_may_be_set_and_layers_frozen() -> None:
    session = trained()
    with torch.no_grad():
        body(session)[0].weight.data.copy_(torch.zeros_like(body(session)[0].weight))
    body(session)[0].bias.requires_grad_(False)
    assert hold_round(session, 2) == {}


def watched(kind: str, layout: str, *overrides: str) -> Any:
    """In a worker: whether every parameter is watched, and what a round finds; then rank 1 replaces one."""
    with warnings.catch_warnings(), patch.object(compiled, "BACKEND", "aot_eager"):
        warnings.simplefilter("ignore")  # torch may warn while it compiles
        session = trained(kind, layout, *overrides)
    (linkage,) = [one for one in session.posted.comparing if isinstance(one, Linkage)]
    here = {name for name, entry in session.spread.map.items() if entry.kind == "parameter"}
    silent = list(hold_round(session, 2))
    name = next(iter(session.spread.trainable()))
    owner = body(session).get_submodule(name.rpartition(".")[0])
    if dist.get_rank() == 1:
        setattr(owner, name.rpartition(".")[2], nn.Parameter(torch.zeros(2, 2)))
    return here == set(linkage.watched), silent, hold_round(session, 2)["linkage"].what


LAYOUTS = [
    ("mlp", "ddp"),
    ("transformer", "fsdp"),
    ("tied", "fsdp", "layout.sharding=grad_op"),
    ("transformer", "tp=2"),
    ("mlp", "dp_shard=2,sharding=optimizer"),
    ("transformer", "fsdp", "layout.compile=block"),
    ("moe", "dp_shard=2,ep=2"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.full] * (at > 3)) for at, one in enumerate(LAYOUTS)]
)
def test_every_parameter_of_every_layout_is_watched(pool: Pools, case: tuple[str, ...]) -> None:
    for everything, silent, what in pool(2).run(watched, *case):
        assert everything and silent == []
        assert "have parted on rank 1: the model has another tensor for" in what
