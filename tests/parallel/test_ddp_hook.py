"""How a bucket of gradients travels: what float16 can hold, what is not finite, and outside of steps."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.ddp_hook import DdpHook, make_hook
from allranks.parallel.mesh import build_mesh
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, parts_of, session_of, step_through
from tests.distributed.tasks import IGNORED, Tiny
from tests.parallel.test_replicate import PartialTask

pytestmark = pytest.mark.distributed


class Bucket:
    """One parameter's gradient, as DDP hands it over."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._parameter, self._gradient = parameter, gradient

    def buffer(self) -> torch.Tensor:
        return self._gradient.view(-1)

    def parameters(self) -> list[torch.Tensor]:
        return [self._parameter]

    def gradients(self) -> list[torch.Tensor]:
        return [self._gradient]


def reduced(kind: str, values: Sequence[Sequence[float]], step: int | None, start: int = 0) -> list[float]:
    """What a hook makes of this rank's row of `values`."""
    layout = Layout(dp_replicate=dist.get_world_size(), ddp_hook=cast(Any, kind), powersgd_start=start)
    gradient = torch.tensor(values[dist.get_rank()])
    parameter = nn.Parameter(torch.zeros_like(gradient))
    hook = DdpHook(layout, {"w": parameter}, dist.group.WORLD)
    with nullcontext() if step is None else hook.within(step):
        found = hook.reduce(None, cast(Any, Bucket(parameter, gradient))).wait()
    return [float(value) for value in found]


@pytest.mark.parametrize("size", [1e-12, 1e-38, 0.9999, 6e4, 1e9, 3e37])
def test_float16_holds_gradients_of_any_size(pool: Pools, size: float) -> None:
    """Undivided sums and tiny means alike; two of the largest are added."""
    values = [[size, 0.5 * size, 0.0, -size], [size, 0.0, 1e-3 * size, size]]
    for found in pool(2).run(reduced, "float16", values, 0):
        assert found == pytest.approx([size, 0.25 * size, 5e-4 * size, 0.0], rel=1e-3, abs=0.0)


def test_float16_without_any_gradient(pool: Pools) -> None:
    assert pool(2).run(reduced, "float16", [[0.0, 0.0]] * 2, 0) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_what_is_not_finite_stays_so(pool: Pools, kind: str) -> None:
    for found in pool(2).run(reduced, kind, [[math.inf, 1.0, 2.0], [1.0, math.nan, 2.0]], 0):
        assert found[0] == math.inf and math.isnan(found[1]) and found[2] == 2.0


@pytest.mark.parametrize(("kind", "expected"), [("bfloat16", 1.0), ("float16", 1.0009765625)])
def test_each_rounds_to_its_own_type(pool: Pools, kind: str, expected: float) -> None:
    """Half of 1 + 2**-9 and of 1 + 2**-9 + 2**-11: what is beyond the type's bits is gone."""
    values = [[1 + 2.0**-10], [1 + 2.0**-10]]
    assert pool(2).run(reduced, kind, values, 0) == [[expected]] * 2


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "powersgd"])
def test_outside_of_steps_and_before_the_start_gradients_are_whole(pool: Pools, kind: str) -> None:
    values = [[1.0 + 2.0**-20, 3.0], [1.0, 5.0]]
    mean = [1.0 + 2.0**-21, 4.0]
    assert pool(2).run(reduced, kind, values, None) == [mean] * 2
    if kind == "powersgd":
        assert pool(2).run(reduced, kind, values, 6, 7) == [mean] * 2


def run_partial(*overrides: str) -> tuple[Any, list[str]]:
    config = config_of("ddp", *overrides, "train.micro_steps=2", steps=3)
    session = session_of(PartialTask(), config)
    list(step_through(session, 3))
    return parts_of(session), [str(decision) for decision in session.decisions]


def test_it_stays_where_ddp_is_built_anew(pool: Pools) -> None:
    """A parameter without gradient makes a new DDP at the start."""
    (plain, _), _ = pool(2).run(run_partial)
    (found, said), _ = pool(2).run(run_partial, "layout.ddp_hook=bfloat16")
    assert any(line.startswith("every backward is searched") for line in said)
    assert not torch.equal(found["used.weight"][2], plain["used.weight"][2])
    assert torch.equal(found["never.0.weight"][2], plain["never.0.weight"][2])


def decisions_of(*overrides: str) -> list[str]:
    session = session_of(Tiny(kind="mlp"), config_of("ddp", *overrides, precision="float32"))
    return [str(decision) for decision in session.decisions if "layout.ddp_hook" in decision.because]


def test_the_start_says_what_travels(pool: Pools) -> None:
    # 5 -> 7 -> 7 -> 7 -> 3: 4 weights and 4 biases, 178 numbers
    numbers = (5 + 1) * 7 + 2 * (7 + 1) * 7 + (7 + 1) * 3
    said = pool(2).run(decisions_of, "layout.ddp_hook=bfloat16")[0]
    why = "because layout.ddp_hook=bfloat16; that rounds them, so that a run differs from one device's"
    assert said == [f"gradients are summed in bfloat16: {2 * numbers} B a step instead of {4 * numbers} B, {why}"]
    said = pool(2).run(decisions_of, "layout.ddp_hook=powersgd", "layout.powersgd_rank=1")[0]
    low = 4 * (numbers - 35 - 49 - 49 - 21 + 12 + 14 + 14 + 10)
    assert said == [
        f"from step 1001 on {low} B of gradients travel a step instead of {4 * numbers} B, because "
        "layout.ddp_hook=powersgd: 4 matrices go as rank 1, 4 tensors whole; that differs from what one device computes"
    ]


def without_ddp() -> str:
    mesh = build_mesh(Layout(dp_replicate=2, ddp_hook="bfloat16"), "cpu")
    try:
        make_hook({"": nn.Linear(2, 2)}, mesh, {}, {}, [])
    except LayoutError as error:
        return str(error)
    return ""


def test_without_ddp_it_is_refused(pool: Pools) -> None:
    said = (
        "layout.ddp_hook=bfloat16 changes what DDP sends, and a Task with a step() of its own has no DDP: leave it out"
    )
    assert pool(2).run(without_ddp) == [said] * 2


def test_the_points_have_uneven_targets() -> None:
    assert IGNORED in {Tiny().dataset("train")[index]["y"] for index in range(6)}
