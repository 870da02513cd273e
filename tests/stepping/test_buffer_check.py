"""Buffers that follow the data are refused over several data-parallel ranks; those that count forwards are not."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from allranks.errors import LayoutError
from allranks.stepping import buffer_check
from allranks.stepping.buffer_check import check_buffers
from allranks.stepping.session import Session
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.training.tasks import Curve, Gan, points

SMALL = ("train.global_batch=6",)


class Instance(nn.Module):
    """Running statistics over the instances of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 6)
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.linear(x).unflatten(1, (3, 2))).flatten(1))
        return found


class Remembering(nn.Module):
    """Writes something of its input into a buffer, while it trains."""

    def __init__(self, remember: Callable[[nn.Module, torch.Tensor], None], *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.remember = remember
        self.register_buffer("fixed", torch.full((2,), torch.nan))
        self.register_buffer("state", torch.ones(2), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.remember(self, x)
        found: torch.Tensor = self.linear(x)
        return found


def statistics(module: nn.Module, x: torch.Tensor) -> None:
    """In place."""
    module.get_buffer("state").mul_(0.9).add_(0.1 * x.mean(0))


def learnt(module: nn.Module, x: torch.Tensor) -> None:
    """With a new tensor that has a gradient's history."""
    module.state = 0.9 * module.get_buffer("state") + module.get_submodule("linear")(x).mean(0)


def spread_out(module: nn.Module, x: torch.Tensor) -> None:
    """In place, with a gradient's history."""
    module.get_buffer("state").add_(module.get_submodule("linear")(x).mean(0))


def longest(module: nn.Module, x: torch.Tensor) -> None:
    """A table whose length depends on the samples."""
    module.state = torch.arange(1 + int(x[0, 0].abs() * 1e6), dtype=x.dtype)


def counted(module: nn.Module, x: torch.Tensor) -> None:
    """The same whatever the samples are."""
    module.get_buffer("state").add_(1)


def seen(module: nn.Module, x: torch.Tensor) -> None:
    """As many for each batch of this size."""
    module.state = module.get_buffer("state") + len(x)


def drawn(module: nn.Module, x: torch.Tensor) -> None:
    """Noise, of all three generators."""
    noise = torch.rand(2) + random.random() + float(numpy.random.rand())
    module.get_buffer("state").copy_(noise)


class Given(Curve):
    """A model given by the test."""

    _made: Any = None

    def model(self) -> Any:
        return self._made


def given(made: nn.Module) -> Given:
    task = Given()
    task._made = made
    return task


def remember(session: Session, written: Callable[[nn.Module, torch.Tensor], None]) -> Any:
    """The session's Remembering, which from now on writes this."""
    module: Any = session.spread.bare()
    module.remember = written
    return module


def met(task: Any, layout: str) -> str:
    """In a worker: what a session was refused for, or "" after two steps."""
    try:
        session = session_of(task, config_of(layout, *SMALL))
    except LayoutError as error:
        return str(error)
    for _ in step_through(session, 2):
        pass
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("made", "first"),
    [
        (Instance(), "norm.running_mean (2 in all)"),
        (Remembering(statistics), "state (1 in all)"),
        (Remembering(statistics, persistent=False), "state (1 in all)"),
        (Remembering(learnt), "state (1 in all)"),
        (Remembering(spread_out), "state (1 in all)"),
        (Remembering(longest), "state (1 in all)"),
    ],
)
def test_what_follows_the_data_is_refused_over_several_ranks(
    pool: Pools, layout: str, made: nn.Module, first: str
) -> None:
    refused = (
        f"buffer {first} changes with the samples of a forward, and each of 2 data-parallel ranks sees its own only: "
        "only BatchNorm's are synchronised; use --layout single"
    )
    assert pool(2).run(met, given(made), layout) == [refused] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("written", [counted, seen, drawn])
def test_what_does_not_is_trained(pool: Pools, layout: str, written: Any) -> None:
    assert pool(2).run(met, given(Remembering(written)), layout) == ["", ""]


@pytest.mark.distributed
def test_a_table_that_no_checkpoint_holds_may_have_any_length(pool: Pools) -> None:
    def case() -> None:
        session = session_of(given(Remembering(counted, persistent=False)), config_of("ddp", *SMALL))
        remember(session, longest)
        check_buffers(session.forward, samples_of(4), None)

    pool(2).run(case)


@pytest.mark.parametrize("made", [Instance(), Remembering(statistics)])
def test_alone_it_is_trained(made: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_check, "_left_behind", None)  # not even asked
    assert met(given(made), "single") == ""


def samples_of(num: int) -> list[Any]:
    """Of Curve's kind, in the precision of the tests."""
    x, y = points(num, seed=1).tensors
    return list(zip(x.double(), y, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("written", [statistics, learnt, spread_out, drawn])
def test_nothing_is_left_behind(pool: Pools, layout: str, written: Any) -> None:
    def case() -> None:
        session = session_of(given(Remembering(counted)), config_of(layout, *SMALL))
        module = remember(session, written)
        module.linear.eval()  # a part that is frozen stays so
        buffers = dict(module.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        torch.manual_seed(0)
        states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state()
        if written is drawn:
            check_buffers(session.forward, samples_of(5), None)
        else:
            with pytest.raises(LayoutError, match="buffer state"):
                check_buffers(session.forward, samples_of(5), None)
        assert states[:2] == (random.getstate(), str(numpy.random.get_state()))
        assert torch.equal(states[2], torch.get_rng_state())
        assert all(module.get_buffer(name) is buffer for name, buffer in buffers.items())
        assert all(torch.equal(buffer.nan_to_num(7), before[name].nan_to_num(7)) for name, buffer in buffers.items())
        assert not any(buffer.requires_grad for buffer in buffers.values())
        assert [part.training for part in module.modules()] == [True, False]
        assert all(parameter.grad is None for parameter in module.parameters())
        assert all(isinstance(p, DTensor) for p in module.parameters()) == (layout == "fsdp"), "left gathered"

    pool(2).run(case)


@pytest.mark.distributed
def test_a_failing_forward_leaves_the_buffers(pool: Pools) -> None:
    def fail(module: nn.Module, x: torch.Tensor) -> None:
        module.get_buffer("state").zero_()
        module.state = torch.zeros(3)
        raise ZeroDivisionError

    def case() -> None:
        session = session_of(given(Remembering(counted)), config_of("ddp", *SMALL))
        module = remember(session, fail)
        with pytest.raises(ZeroDivisionError):
            check_buffers(session.forward, samples_of(2), None)
        assert module.get_buffer("state").tolist() == [1.0, 1.0]

    pool(2).run(case)


@pytest.mark.distributed
def test_one_sample_shows_nothing(pool: Pools) -> None:
    def case(num: int) -> None:
        session = session_of(given(Remembering(counted)), config_of("ddp", *SMALL))
        remember(session, statistics)
        check_buffers(session.forward, samples_of(num), None)

    pool(2).run(case, 1)
    with pytest.raises(Exception, match="buffer state"):
        pool(2).run(case, 2)


class Sides(IterableDataset[Any]):
    """Shards itself: the points of odd ranks are all the same one."""

    order = "sharded"

    def __iter__(self) -> Iterator[Any]:
        odd = torch.distributed.get_rank() % 2
        return iter(samples_of(40) if not odd else samples_of(1) * 40)


class Sided(Given):
    def dataset(self, split: str) -> Any:
        return Sides() if split == "train" else None


@pytest.mark.distributed
def test_ranks_that_see_other_samples_are_refused_together(pool: Pools) -> None:
    """Rank 1 sees nothing of it in its own samples."""
    task = Sided()
    task._made = Remembering(statistics)
    found = pool(2).run(met, task, "ddp")
    assert found[0] == found[1] and "buffer state (1 in all)" in found[0]


class Watched(Gan):
    """One of its models remembers something."""

    _written: Any = None

    def model(self) -> Any:
        made = super().model()
        return made | {"maker": nn.Sequential(made["maker"], Remembering(self._written))}


def stepped(written: Any, *cut: str) -> str:
    """In a worker: what two steps of a Task with a `step` were refused for, or ""."""
    task = Watched()
    task._written = written
    session = session_of(task, config_of("ddp", *cut))
    try:
        for _ in step_through(session, 2):
            pass
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("cut", [SMALL, ("train.global_batch=3", "train.micro_batch=1")])  # the second has fillers
def test_a_task_with_a_step_is_asked_after_its_first_forward(pool: Pools, cut: tuple[str, ...]) -> None:
    refused = (
        "buffer maker.1.state (1 in all) changes with the samples of a forward, and each of 2 data-parallel ranks sees "
        "its own only: only BatchNorm's are synchronised; use --layout single"
    )
    assert pool(2).run(stepped, statistics, *cut) == [refused] * 2
    assert pool(2).run(stepped, counted, *cut) == [""] * 2


def test_copies_of_data_parallel_are_asked_as_ranks_are() -> None:
    """What the copies on other GPUs write into buffers is lost."""
    session = session_of(given(Remembering(counted)), config_of("data_parallel", *SMALL))
    remember(session, statistics)
    check_buffers(session.forward, samples_of(8), None)
    called: Any = session.spread.modules[""]
    called.device_ids = [0, 1]
    with pytest.raises(LayoutError, match=r"buffer state .* and each of 2 GPUs sees its own only"):
        check_buffers(session.forward, samples_of(8), None)
