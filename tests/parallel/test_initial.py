"""Law 5: initial values are those of model() under the seed on one process, for every layout."""

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from allranks.data.random_keys import seed_all
from allranks.errors import TaskError
from allranks.parallel import initial
from allranks.parallel.initial import Placer, Source, build_modules, check_same_structure
from tests.distributed.matrix_models import task_of
from tests.distributed.pool import Pools
from tests.distributed.sessions import (
    config_of,
    initial_model,
    parts_of,
    processes_of,
    session_of,
    step_through,
    together,
)
from tests.distributed.tasks import MODELS, Tiny

CPU = torch.device("cpu")
ALONE = Source()
FOLLOWS = Source(leads=False)


def no_seed() -> None:
    """The test wants no seed."""


class Odd(nn.Module):
    """Parameters and buffers of every kind, drawn from all three generators."""

    expanded: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.tied = self.linear.weight
        self.numbers = nn.Parameter(torch.from_numpy(numpy.random.rand(3)).float() * random.random())
        self.scalar = nn.Parameter(torch.rand(()))
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("flags", torch.rand(9) > 0.5)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("expanded", torch.rand(4).expand(3, 4))
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x), self.numbers.expand(len(x), 3)], -1) * self.scalar


class Needing(nn.Module):
    """Cannot be built without memory: it looks at a value, after drawing a number that is no tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(random.random()))
        self.linear = nn.Linear(5, 3)
        self.scale = float(self.linear.weight.detach().abs().max().item())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) / self.scale
        return found


class OddTask(Tiny):
    def model(self) -> nn.Module:
        return Odd()


class NeedingTask(Tiny):
    def model(self) -> nn.Module:
        return Needing()


def test_the_leader_builds_in_memory_and_a_follower_without() -> None:
    real, _ = build_modules(MODELS["tied"], ALONE, no_seed)
    hollow, decisions = build_modules(MODELS["tied"], FOLLOWS, no_seed)
    assert not any(p.is_meta for p in real[""].parameters())
    assert all(p.is_meta for p in hollow[""].parameters())
    assert decisions == []


def test_the_seed_comes_first() -> None:
    def seed() -> None:
        torch.manual_seed(5)

    first, second = (build_modules(MODELS["mlp"], ALONE, seed)[0][""] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


class Scaled(nn.Module):
    """Holds tensors that are neither parameters nor buffers, as much code does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.masks = [torch.rand(2)]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.inner.masks[0]  # type: ignore[index]
        return found


def test_a_model_with_tensors_as_plain_attributes_is_built_in_full_and_they_are_named() -> None:
    def seed() -> None:
        seed_all(5)

    leader, none = build_modules(Scaled, ALONE, seed)
    follower, (decision,) = build_modules(Scaled, FOLLOWS, seed)
    assert none == [] and "because inner.masks is a tensor and neither parameter nor buffer" in str(decision)
    x = torch.ones(2)
    assert torch.equal(leader[""](x), follower[""](x))


def test_what_a_tensor_consists_of_is_no_attribute_of_a_parameter() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        values = [torch.ones(2, 2), torch.ones(2, 2)]
        module.weight = nn.Parameter(TwoTensor(*values))
        return module

    modules, decisions = build_modules(build, FOLLOWS, no_seed)
    assert modules[""].weight.is_meta and not decisions


def test_a_model_that_needs_values_is_built_in_full_and_that_is_said() -> None:
    def seed() -> None:
        seed_all(5)

    leader, _ = build_modules(Needing, ALONE, seed)
    follower, (decision,) = build_modules(Needing, FOLLOWS, seed)
    # Seeded again: the attempt without memory has drawn numbers, or not.
    values, others = leader[""].state_dict(), follower[""].state_dict()
    assert all(torch.equal(value, others[name]) for name, value in values.items())
    assert str(decision).startswith("model() is built in full on every rank, because building it without memory raised")


def test_a_fault_of_the_users_is_raised_as_it_is() -> None:
    def broken() -> nn.Module:
        raise ZeroDivisionError("mine")

    for source in (ALONE, FOLLOWS):
        with pytest.raises(ZeroDivisionError, match="mine"):
            build_modules(broken, source, no_seed)


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (None, "model() returned NoneType: return an nn.Module, or a dict of them by name"),
        ({}, "model() returned dict: return an nn.Module, or a dict of them by name"),
        ({"a": nn.ReLU(), "b": 3}, "model() returned dict: return an nn.Module, or a dict of them by name"),
        ({"a.b": nn.ReLU()}, "model() names a module 'a.b': a name is a word without dots"),
        ({1: nn.ReLU()}, "model() names a module 1: a name is a word without dots"),
    ],
)
def test_what_is_no_model_is_refused(built: Any, message: str) -> None:
    with pytest.raises(TaskError) as raised:
        build_modules(lambda: built, ALONE, no_seed)
    assert str(raised.value) == message


def test_in_place_nothing_moves_but_what_could_not_be_written_to() -> None:
    module = Odd()
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    Placer(CPU, ALONE).place(module)
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert list(after) == list(before)
    assert [name for name in after if after[name] is not before[name]] == ["expanded"]
    assert all(torch.equal(after[name].detach(), value) for name, value in values.items())
    module.expanded.copy_(torch.zeros(3, 4))  # raises where elements share memory


def test_what_is_hollow_gets_memory_once_and_stays_tied() -> None:
    with torch.device("meta"):
        module = MODELS["tied"]()
    Placer(CPU, ALONE).place(module)
    assert not any(p.is_meta for p in module.parameters())
    assert module.head.weight is module.embedding.weight  # type: ignore[union-attr]


def test_what_a_module_holds_besides_its_parameters_moves_with_them() -> None:
    lstm = nn.LSTM(3, 4)
    Placer(torch.device("meta"), ALONE).place(lstm)
    assert lstm._flat_weights[0] is lstm.weight_ih_l0 and lstm.weight_ih_l0.is_meta
    assert all(weight is not None and weight.is_meta for weight in lstm._flat_weights)


def integers_under_fsdp(cuts: bool) -> Any:
    """In a worker: what this rank has after a step, whole integers or cut ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "CUTS_INTEGERS", cuts and initial.CUTS_INTEGERS)
        session = session_of(task_of("frozen"), config_of("fsdp", "train.global_batch=8"))
        list(step_through(session, 1))
    return parts_of(session)


@pytest.mark.distributed
def test_integers_stay_whole_where_torch_does_not_cut_them(pool: Pools) -> None:
    found = {cuts: pool(2).run(integers_under_fsdp, cuts) for cuts in (True, False)}
    assert all(tuple(parts["steps"][2].shape) == (5,) for parts in found[False])
    assert all(tuple(parts["steps"][2].shape) < (5,) for parts in found[True]) == initial.CUTS_INTEGERS
    cut, whole = (together(ranks) for ranks in found.values())
    assert torch.equal(whole["steps"], torch.arange(5)) and cut.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in cut.items())


def test_a_unit_that_was_cut_is_let_go() -> None:
    """A follower holds no more than its own part and the unit in flight."""
    module = MODELS["scalars"]()
    placer = Placer(CPU, ALONE)
    placer.place(module)
    scalar = module.blocks[0].gain  # type: ignore[union-attr,index]
    held = weakref.ref(module.get_parameter("first.weight"))
    module.first.weight = nn.Parameter(torch.zeros(1))  # type: ignore[union-attr]
    assert held() is not None
    placer.forget_cut()
    assert held() is None
    assert id(scalar) in placer._placed


def build_apart(by: str) -> str:
    """Rank 1's model differs by a layer, or in what is frozen."""
    differs = dist.get_rank() == 1
    made = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3 if by == "layer" and differs else 2)))
    made[0].bias.requires_grad_(by != "freezing" or not differs)
    modules: dict[str, nn.Module] = {"": made}
    source = Source(dist.group.WORLD, 0, dist.get_rank() == 0)
    try:
        check_same_structure(modules, source, CPU)
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_ranks_that_built_other_models_are_all_told(pool: Pools) -> None:
    expected = (
        "model() built other parameters on 1 rank(s) than on rank 0: make it a function of the task's settings alone"
    )
    assert pool(3).run(build_apart, "layer") == pool(3).run(build_apart, "freezing") == [expected] * 3
    assert pool(3).run(build_apart, "nothing") == [""] * 3


def start(task: Tiny, layout: str, local_size: int | None) -> tuple[Any, list[str]]:
    config = config_of(layout, precision="float32")
    session = session_of(task, config, processes_of(config, local_size))
    assert not any(tensor.is_meta for tensor in session.spread.tensors.values())
    return parts_of(session), [decision.what for decision in session.decisions]


SPREADS: list[tuple[str, int, int | None]] = [
    ("ddp", 3, None),
    ("fsdp", 3, None),
    ("fsdp,sharding=grad_op", 2, None),
    ("fsdp,sharding=none", 2, None),
    ("dp_replicate=2,dp_shard=2", 4, None),
    ("fsdp", 4, 2),  # two hosts, each with a leader of its own
]


@pytest.mark.sample(6)
@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "world_size", "local_size"), SPREADS)
def test_every_layout_starts_from_the_same_bits(
    pool: Pools, layout: str, world_size: int, local_size: int | None
) -> None:
    makers: list[Callable[[], Tiny]] = [OddTask, NeedingTask, *(lambda kind=kind: Tiny(kind=kind) for kind in MODELS)]
    for make in makers:
        ranks = pool(world_size).run(start, make(), layout, local_size)
        found = together([parts for parts, _ in ranks])
        model = initial_model(make())
        tensors = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        expected = {name: tensor.detach() for name, tensor in tensors}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{make().model.__qualname__}: {name}"
        full = [what for _, decisions in ranks for what in decisions if "built in full" in what]
        assert len(full) == (world_size if make is NeedingTask else 0), "also on the ranks whose words are printed"
