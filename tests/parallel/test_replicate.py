"""DDP: what is wrapped, in which buckets, and what a parameter without gradient does to the others."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.data.micro_step import StepBatch
from allranks.errors import TaskError
from allranks.layout import Layout
from allranks.parallel.mesh import build_mesh
from allranks.parallel.replicate import replicate
from allranks.stepping.passes import Passes, Scale, StepSums
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, parts_of, session_of, step_through, together
from tests.distributed.tasks import MODELS, Tiny

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


def wrap(bucket_megabytes: float | None) -> Any:
    layout = Layout(dp_replicate=2, ddp_bucket_mb=bucket_megabytes)
    mesh = build_mesh(layout, "cpu")
    frozen = MODELS["mlp"]().requires_grad_(False)
    assert replicate(frozen, mesh, CPU) is frozen
    wrapped = replicate(MODELS["counted"](), mesh, CPU)
    assert isinstance(wrapped, DistributedDataParallel)
    # A broadcast of buffers before each forward would undo what rank-local buffers are for, and costs a collective.
    assert not wrapped._check_sync_bufs_pre_fwd()
    return wrapped.bucket_bytes_cap, wrapped.bucket_bytes_cap_default, wrapped.find_unused_parameters


def test_what_is_wrapped_and_how(pool: Pools) -> None:
    assert pool(2).run(wrap, None)[0] == (25 * 2**20, True, False)
    assert pool(2).run(wrap, 0.5)[0] == (2**19, False, False)


class Watched(Passes):
    """In how many pieces of memory the gradients lie that are handed over for an update."""

    def __init__(self, inner: Passes) -> None:
        self.inner, self.found, self.parameters = inner, list[tuple[int, int]](), list[torch.Tensor]()

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        for sums in self.inner.run(batch, scale):
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            places = {gradient.untyped_storage().data_ptr() for gradient in gradients}
            self.found.append((len(gradients), len(places)))
            yield sums


def gradients_in_buckets(micro_steps: int) -> list[tuple[int, int]]:
    watched: list[Watched] = []

    def observe(passes: Passes) -> Passes:
        watched.append(Watched(passes))
        return watched[0]

    session = session_of(Tiny(kind="mlp"), config_of("ddp", f"train.micro_steps={micro_steps}"), observe=observe)
    watched[0].parameters = list(session.spread.trainable().values())
    list(step_through(session, 3))
    return watched[0].found


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_gradients_lie_in_the_buckets_themselves(pool: Pools, micro_steps: int) -> None:
    """Views of the buckets: they are held once, and nothing is copied before or after a reduction."""
    assert pool(2).run(gradients_in_buckets, micro_steps) == [[(8, 1)] * 3] * 2


class Partial(nn.Module):
    """Three layers are never used, and one only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.extra = nn.Linear(5, 3)
        self.never = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x) + (self.extra(x) if self.training else 0.0)
        return found


class PartialTask(Tiny):
    def model(self) -> nn.Module:
        return Partial()


def run_partial(layout: str, *overrides: str) -> tuple[Any, list[str]]:
    config = config_of(layout, *overrides, "optimizer.weight_decay=0.5", "train.micro_steps=2", steps=4)
    session = session_of(PartialTask(), config)
    list(step_through(session, 4))
    return parts_of(session), [str(decision) for decision in session.decisions]


def test_a_parameter_without_gradient_holds_up_no_other(pool: Pools) -> None:
    """Plain DDP steps once with gradients that were never reduced, and raises in the second step."""
    alone = together([pool(1).run(run_partial, "single")[0][0]])
    because = "never.0.weight, never.0.bias, never.1.weight, never.1.bias and 2 more got none on the first samples"
    searched = f"every backward is searched for parameters without gradient, because {because}"
    for case in (("ddp",), ("ddp", "layout.static_graph=true"), ("fsdp",)):
        ranks = pool(2).run(run_partial, *case)
        found = together([parts for parts, _ in ranks])
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-15), f"{case}: {name}"
        # A static graph finds them by itself, and FSDP reduces what there is.
        assert any(said.startswith(searched) for said in ranks[0][1]) == (case == ("ddp",))


def rewrap() -> bool:
    session = session_of(Tiny(), config_of("ddp"))
    before = weakref.ref(session.spread.modules[""])
    session.spread.expect_unused()
    after = session.spread.modules[""]
    assert isinstance(after, DistributedDataParallel)
    return before() is None and after.find_unused_parameters


def test_the_old_wrapper_and_its_hooks_are_gone(pool: Pools) -> None:
    assert pool(2).run(rewrap) == [True, True]


class Leaving(nn.Module):
    """In training one layer has no part in the call that `left_out` says, counted from 1; 0: it has in all."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare = nn.Linear(5, 3), nn.Linear(5, 3)
        self.calls = self.left_out = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        found: torch.Tensor = self.used(x)
        return found if self.left_out and self.calls == self.left_out else found + self.rare(x)


class LeavingTask(Tiny):
    def model(self) -> nn.Module:
        return Leaving()


def leave_out(micro_steps: int, *overrides: str, alone: int | None = None) -> tuple[str, Any, Any]:
    """In a worker: the refusal of the last of two steps, which leaves the layer out; values before it and after.

    Args:
        alone: the rank that does so; None: all do.
    """
    config = config_of("ddp", "train.global_batch=8", f"train.micro_steps={micro_steps}", *overrides, steps=2)
    session = session_of(LeavingTask(), config)
    steps = step_through(session, 2)
    next(steps)
    before = parts_of(session)
    model = session.spread.bare()
    assert isinstance(model, Leaving)
    model.calls, model.left_out = 0, micro_steps if alone in (None, dist.get_rank()) else 0
    try:
        list(steps)
    except TaskError as error:
        return str(error), before, parts_of(session)
    return "", before, parts_of(session)


@pytest.mark.parametrize(
    ("micro_steps", "overrides"), [(1, ()), (2, ()), (1, ("layout.static_graph=true",))], ids=["one", "two", "static"]
)
def test_a_layer_left_out_later_is_refused_before_the_update(
    pool: Pools, micro_steps: int, overrides: tuple[str, ...]
) -> None:
    """On all ranks, in the run's last step: DDP would raise in the step after, which there is none of."""
    for refusal, before, after in pool(2).run(leave_out, micro_steps, *overrides):
        assert "rare.weight, rare.bias got no gradient" in refusal and "hints().optional" in refusal
        assert before.keys() == after.keys()
        for name, (*_, value) in before.items():
            assert torch.equal(value, after[name][-1]), name


def test_a_layer_that_one_rank_alone_leaves_out_later_is_refused_there(pool: Pools) -> None:
    """The other waits for gradients that never come, until this rank has ended; who ends first is who is named."""

    def case() -> None:
        refusal, before, after = leave_out(1, alone=1)
        assert all(torch.equal(value, after[name][-1]) for name, (*_, value) in before.items())
        raise TaskError(f"rank {dist.get_rank()}: {refusal}")

    try:
        with pytest.raises(TaskError, match=r"^rank 1: rare\.weight, rare\.bias got no gradient in the last backward"):
            pool(2).run(case, timeout=50)
    finally:
        pool(2).close()
