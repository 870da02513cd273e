"""Modules that a forward may leave out: zero gradients there, and no unit of their own; law 4 for such branches."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.errors import LayoutError, TaskError
from allranks.parallel.optional import check_entered, find_optional, give_zeros, never_left_out
from allranks.task import Hints
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, processes_of, session_of
from tests.distributed.tasks import CLASSES, IGNORED, WIDTH, Tiny
from tests.training.own.cases import refusal

STEPS = 3


class Branch(nn.Module):
    """A layer, and a correction that only some samples get."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.correction = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden, few = torch.tanh(self.linear(hidden)), hidden[:, 0] > 0.6
        if few.any():
            hidden = hidden.index_add(0, few.nonzero()[:, 0], self.correction(hidden[few]))
        return hidden


class Branches(nn.Module):
    """Each sample goes through one of two branches, which one depends on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.branches = nn.ModuleList(Branch() for _ in range(2))
        self.blocks = nn.ModuleList(Branch() for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        out = torch.zeros_like(hidden)
        for index, branch in enumerate(self.branches):
            mine = (x[:, 0] > 0.9) == bool(index)
            if mine.any():
                out = out.index_add(0, mine.nonzero()[:, 0], branch(hidden[mine]))
        for block in self.blocks:
            out = block(out)
        found: torch.Tensor = self.last(out)
        return found


OPTIONAL = ("branches.*", "blocks.*.correction")


class Branching(Tiny):
    """Branches, declared."""

    cuts: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        return Branches()

    def hints(self) -> Hints:
        return Hints(optional=OPTIONAL, split_before=self.cuts)


LAYOUTS = [
    ("single", 1, 7, 1),
    ("ddp", 2, 5, 1),
    ("ddp", 3, 5, 3),
    ("fsdp", 2, 5, 1),
    ("fsdp", 3, 5, 3),
    ("fsdp,sharding=grad_op", 2, 5, 3),
    ("fsdp,recompute=full", 2, 5, 1),
    ("dp_replicate=2,dp_shard=2", 4, 6, 3),
    ("dp_shard=2,sharding=optimizer", 2, 5, 1),
    ("pp=2", 2, 6, 2),
    ("pp=2,dp_shard=2", 4, 8, 2),
    ("pp=2,dp_replicate=2", 4, 8, 2),
    ("pp=2,schedule=zbv", 2, 8, 4),
]


def record(layout: str, global_batch: int, micro_steps: int) -> tuple[list[RecordedStep], list[str]]:
    cut = f"train.global_batch={global_batch}", f"train.micro_steps={micro_steps}"
    config = config_of(layout, *cut, "optimizer.name=adamw", steps=STEPS)
    processes, task = processes_of(config), branching(layout)
    entered = session_of(task, config, processes).spread.decisions
    return record_run(task, config, processes, STEPS), [str(decision) for decision in entered]


def branching(layout: str) -> Branching:
    task = Branching()
    task.cuts = ("blocks.0", "blocks.1", "last") if "zbv" in layout else ("blocks.1",) if "pp" in layout else ()
    return task


def reference(ranks: list[list[RecordedStep]], num_shares: int) -> list[ReferenceStep]:
    """One device, on which what is left out gets zeros, too."""
    task = Branching()
    dataset, model = task.dataset("train"), initial_model(task).double()
    batches = []
    for step in range(STEPS):
        batch = default_collate([dataset[sample] for sample in fed(ranks, step, range(num_shares)).values()])
        batches.append((batch | {"x": batch["x"].double()}, int((batch["y"] != IGNORED).sum())))

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, Branches)
        corrections = [branch.correction for branch in model.blocks if isinstance(branch, Branch)]
        zeros = [p.sum() * 0 for part in (model.branches, *corrections) for p in part.parameters()]
        return task.loss(model(batch["x"]), batch) + torch.stack(zeros).sum()

    return plain_loop(model, lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.01), batches, forward)


@pytest.mark.sample(3)
@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "world_size", "global_batch", "micro_steps"), LAYOUTS)
def test_branches_that_differ_by_rank_are_those_of_one_device(
    pool: Pools, layout: str, world_size: int, global_batch: int, micro_steps: int
) -> None:
    found = pool(world_size).run(record, layout, global_batch, micro_steps)
    ranks = [steps for steps, _ in found]
    differences = compare(ranks, reference(ranks, world_size // 2 if "pp" in layout else world_size), adaptive=True)
    assert not differences, "; ".join(map(str, differences[:5]))
    said = "\n".join(found[0][1])
    assert "4 modules get zero gradients where a forward leaves them out, because hints().optional names them" in said
    if "fsdp" in layout:
        assert "2 units and the root of the model" in said  # the blocks, without what is left out


@pytest.mark.distributed
def test_the_ranks_of_these_cases_do_enter_other_branches() -> None:
    """Else the test above would show nothing."""
    dataset = Branching().dataset("train")
    routes = [bool(dataset[index]["x"][0] > 0.9) for index in range(61)]
    assert 5 < sum(routes) < 20


def test_whom_a_pattern_means() -> None:
    modules: dict[str, nn.Module] = {"": Branches()}
    assert find_optional(modules, ("blocks.*.correction",)) == {"": ["blocks.0.correction", "blocks.1.correction"]}
    assert find_optional({"a": Branches(), "b": Branches()}, ("b.branches.1",)) == {"a": [], "b": ["branches.1"]}
    with pytest.raises(LayoutError, match=r"hints\(\)\.optional: 'branch\.\*' matches no module.*nearest are branches"):
        find_optional(modules, ("branch.*",))


def test_what_is_optional_is_no_unit() -> None:
    blocks = ["branches.0", "branches.10", "blocks.0", "blocks.0.correction"]
    assert never_left_out(blocks, ["branches.1", "blocks.0.correction"]) == ["branches.0", "branches.10", "blocks.0"]
    assert never_left_out(blocks, ["branches", "blocks.0"]) == []


class Maybe(nn.Module):
    """Two layers, the second of which is left out; what it returns is given."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.used, self.unused, self.output = nn.Linear(2, 2), nn.Linear(2, 2), output
        self.unused.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.used(x))


@pytest.mark.parametrize("output", [lambda x: x, lambda x: {"n": 3, "x": [torch.ones(1, dtype=torch.int64), x]}])
def test_zeros_where_nothing_was_computed(output: Any) -> None:
    model = Maybe(output)
    x = torch.randn(3, 2)
    before = model(x)
    give_zeros(model, ["unused"], [])
    found = model(x)
    leaf = found if isinstance(found, torch.Tensor) else found["x"][1]
    assert torch.equal(leaf, before if isinstance(before, torch.Tensor) else before["x"][1])
    leaf.sum().backward()
    assert model.unused.weight.grad is not None and not model.unused.weight.grad.any()
    assert model.unused.bias.grad is None
    assert model.used.weight.grad is not None and bool(model.used.weight.grad.any())
    with torch.no_grad():
        assert not model(x).requires_grad if isinstance(found, torch.Tensor) else True


@dataclass
class Output:
    kind: str
    logits: torch.Tensor
    hidden: torch.Tensor


def test_a_dataclass_carries_them_in_its_first_tensor() -> None:
    model = Maybe(lambda x: Output("one", x, x.detach()))
    give_zeros(model, ["unused"], [])
    found = model(torch.ones(3, 2))
    assert isinstance(found, Output) and found.kind == "one" and not found.hidden.requires_grad
    found.logits.sum().backward()
    assert model.unused.weight.grad is not None and not model.unused.weight.grad.any()


def test_a_loss_may_change_the_output_in_place() -> None:
    model = Maybe(lambda x: x)
    give_zeros(model, ["unused"], [])
    output = model(torch.ones(3, 2))
    output /= 2
    output.sum().backward()
    assert model.used.bias.grad is not None and model.used.bias.grad.tolist() == [1.5, 1.5]
    assert model.unused.weight.grad is not None and not model.unused.weight.grad.any()


def test_what_another_stage_holds_gets_none_here() -> None:
    model = Maybe(lambda x: x)
    model.unused.to_empty(device="meta")
    give_zeros(model, ["unused"], [])
    model(torch.randn(3, 2)).sum().backward()
    assert model.unused.weight.grad is None and model.used.weight.grad is not None


def test_an_output_that_cannot_carry_them_is_refused() -> None:
    model = Maybe(lambda x: (x > 0).long())
    give_zeros(model, ["unused"], [])
    with pytest.raises(TaskError, match=r"hints\(\)\.optional: the model returns .*no floating-point tensor is found"):
        model(torch.randn(1, 2))


def test_no_stage_begins_where_a_forward_may_not_come_by() -> None:
    check_entered(["blocks.1", "last"], ["blocks.1.correction", "branches"])
    for optional in (["blocks.1"], ["blocks"]):
        with pytest.raises(LayoutError, match=r"a forward may leave out blocks\.1, with which a stage of the pipeline"):
            check_entered(["last", "blocks.1"], optional)


@pytest.mark.distributed
def test_such_a_cut_is_refused(pool: Pools) -> None:
    def case() -> str:
        task = Branching()
        task.cuts = ("branches.1",)
        return refusal(lambda: session_of(task, config_of("pp=2", "train.global_batch=8")))

    assert all("a forward may leave out branches.1, with which a stage" in found for found in pool(2).run(case))
