"""The plain loop that everything is compared with: it is what a reader would write, and knows nothing of ours."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks.verifying.reference
from allranks.verifying.reference import plain_loop, rankwise_loop, scaled_loop


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1).double()


def squares(module: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = module(batch).square().sum()
    return loss


BATCHES = [(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), 2), (torch.ones(3, 2).double(), 3)]


def test_it_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(allranks.verifying.reference.__file__).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not any(name.startswith("allranks") for name in imported)


def test_a_step_by_hand() -> None:
    trained = model()
    weight, bias = trained.weight.detach().clone(), trained.bias.detach().clone()
    (step, _) = plain_loop(trained, lambda p: torch.optim.SGD(p, lr=0.5), BATCHES, squares)
    x, targets = BATCHES[0]
    output = x @ weight.T + bias
    gradient = {"weight": (2 * output * x).sum(0, keepdim=True) / targets, "bias": (2 * output).sum(0) / targets}
    assert step.loss == pytest.approx(float(output.square().sum()) / targets)
    assert step.norm == pytest.approx(float(torch.cat([g.flatten() for g in gradient.values()]).norm()))
    for name, value in (("weight", weight), ("bias", bias)):
        assert torch.allclose(step.gradients[name], gradient[name])
        assert torch.allclose(step.parameters[name], value - 0.5 * gradient[name])


def test_clipping_comes_after_what_is_told() -> None:
    free = plain_loop(model(), lambda p: torch.optim.SGD(p, lr=1.0), BATCHES[:1], squares)[0]
    clipped = plain_loop(model(), lambda p: torch.optim.SGD(p, lr=1.0), BATCHES[:1], squares, max_norm=0.5)[0]
    assert clipped.norm == free.norm > 0.5
    assert torch.equal(clipped.gradients["weight"], free.gradients["weight"])
    moved = torch.cat([(model().state_dict()[n] - clipped.parameters[n]).flatten() for n in ("weight", "bias")])
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-5)


def test_what_the_user_does_after_an_update_is_part_of_the_step() -> None:
    def double(module: nn.Module) -> None:
        with torch.no_grad():
            module.get_parameter("weight").mul_(2)

    alone, doubled = (
        plain_loop(model(), lambda p: torch.optim.SGD(p, lr=0.5), BATCHES[:1], squares, finish=finish)[0]
        for finish in (lambda module: None, double)
    )
    assert torch.equal(doubled.parameters["weight"], 2 * alone.parameters["weight"])


def test_factors_move_the_rate_from_its_peak() -> None:
    steps = plain_loop(
        model(), lambda p: torch.optim.SGD(p, lr=1.0), BATCHES, squares, factors=lambda step: (0.5, 0.25)[step]
    )
    second = steps[0].parameters["bias"] - steps[1].parameters["bias"]
    assert torch.allclose(second, 0.25 * steps[1].gradients["bias"])


def test_frozen_and_unused_parameters_have_no_gradient_and_stay() -> None:
    trained = nn.ModuleDict({"used": model(), "frozen": model().requires_grad_(False), "unused": model()})
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}

    def forward(module: Any, batch: Any) -> torch.Tensor:
        return squares(module["used"], batch) + squares(module["frozen"], batch).detach()

    (step,) = plain_loop(trained, lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.5), BATCHES[:1], forward)
    assert sorted(step.gradients) == ["used.bias", "used.weight"]
    assert step.parameters.keys() == before.keys()
    moved = [name for name, value in before.items() if not torch.equal(value, step.parameters[name])]
    assert sorted(moved) == ["used.bias", "used.weight"]


def test_a_batch_without_targets_is_not_divided_by_zero() -> None:
    (step,) = plain_loop(model(), lambda p: torch.optim.SGD(p, lr=1.0), [(torch.zeros(0, 2).double(), 0)], squares)
    assert (step.loss, step.norm) == (0.0, 0.0)


def test_buffers_are_those_after_the_step_and_no_counts_of_forwards() -> None:
    trained = nn.Sequential(nn.BatchNorm1d(2, momentum=1.0), model()).double()
    steps = plain_loop(trained, lambda p: torch.optim.SGD(p, lr=0.1), BATCHES, squares)
    assert [sorted(step.buffers) for step in steps] == [["0.running_mean", "0.running_var"]] * 2
    assert [step.buffers["0.running_mean"].tolist() for step in steps] == [[2.0, 3.0], [1.0, 1.0]]


def test_one_process_plays_two_ranks() -> None:
    """Each normalises its own rows only, and remembers only these."""
    norm = nn.BatchNorm1d(2, affine=False, momentum=1.0)
    last = model()
    trained = nn.Sequential(norm, last)
    first, second = torch.tensor([[1.0, 2.0], [3.0, 6.0]]).double(), torch.tensor([[5.0, 0.0], [9.0, 4.0]]).double()
    weight, bias = last.weight.detach().clone(), last.bias.detach().clone()
    steps = [([[first, None], [None, second]], 4), ([[None, first]], 2)]
    (step, _), buffers = rankwise_loop(trained.double(), lambda p: torch.optim.SGD(p, lr=0.1), steps, squares, 2)
    assert step.buffers == {}, "none that all ranks have"
    rows = torch.cat([(x - x.mean(0)) / (x.var(0, correction=0) + norm.eps).sqrt() for x in (first, second)])
    assert step.loss == pytest.approx(float((rows @ weight.T + bias).square().sum()) / 4, rel=1e-12)
    assert buffers[0]["0.running_mean"].tolist() == [2.0, 4.0] and buffers[1]["0.running_mean"].tolist() == [2.0, 4.0]
    assert [int(own["0.num_batches_tracked"]) for own in buffers] == [1, 2]


def test_in_float16_a_step_that_overflows_is_skipped() -> None:
    """A rank's gradient of the bias is twice the scale: it leaves float16 at the first two scales."""
    x = torch.full((4, 2), 0.5)

    def total(module: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = module(batch).float().sum()
        return loss

    trained = model().float()
    before = trained.weight.detach().clone()
    steps = scaled_loop(trained, lambda p: torch.optim.SGD(p, lr=0.5), [([x, x], 2)] * 4, total)
    assert [step.scale for step in steps] == [2.0**16, 2.0**15, 2.0**14, 2.0**14]
    assert [step.skipped for step in steps] == [True, True, False, False]
    assert torch.equal(steps[1].parameters["weight"], before)
    assert torch.allclose(steps[2].parameters["weight"], before - 0.5 * 2.0)
