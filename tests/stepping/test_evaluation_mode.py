"""Evaluation mode: modules that override `train(mode)` hear of both ways, and parameters are as before."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from allranks.stepping.evaluation_mode import evaluation_mode
from allranks.stepping.kept_state import undisturbed
from allranks.training.validate import validate
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, parts_of, session_of, step_through, together
from tests.distributed.tasks import Tiny


class Merging(nn.Linear):
    """As loralib's Linear: adapters beside a frozen weight, merged into it by train(False)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.a, self.b = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.zeros(out, 2))
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = F.linear(x, self.weight, self.bias)
        return found if self.merged else found + x @ self.a.t() @ self.b.t()


class Cached(nn.Linear):
    """As layers of normalising flows: what evaluation has cached, train() drops."""

    cache: torch.Tensor | None = None

    def train(self, mode: bool = True) -> "Cached":
        self.cache = None if mode else self.cache
        super().train(mode)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return F.linear(x, self.weight)
        self.cache = self.weight.detach().clone() if self.cache is None else self.cache
        return F.linear(x, self.cache)


def adapted() -> Merging:
    torch.manual_seed(3)
    made = Merging(4, 5)
    nn.init.normal_(made.b)
    return made


@pytest.mark.parametrize("enter", [lambda module: evaluation_mode([module]), undisturbed])
def test_merged_adapters_are_apart_again_to_the_bit(enter: Any) -> None:
    made, x = adapted(), torch.randn(3, 4)
    weight, output = made.weight.clone(), made(x)
    made.eval().train()
    assert not torch.equal(made.weight, weight)  # by itself it leaves a rounded one
    made.weight.data.copy_(weight)
    with enter(made):
        assert made.merged and not torch.equal(made.weight, weight)
        assert torch.allclose(made(x), output, rtol=1e-5)
    assert (made.training, made.merged) == (True, False)
    assert torch.equal(made.weight, weight)


def test_what_was_cached_is_dropped() -> None:
    made, x = Cached(2, 2), torch.randn(3, 2)
    for _ in range(2):
        nn.init.normal_(made.weight)
        with evaluation_mode([made]):
            assert torch.equal(made(x), F.linear(x, made.weight))
        assert made.cache is None


def test_each_part_is_told_of_its_own_mode() -> None:
    """A part in evaluation mode stays merged in a model that trains; a part whose flag alone was written keeps it."""
    frozen, other = adapted().eval(), nn.Dropout()
    made = nn.Sequential(frozen, nn.Sequential(adapted(), other))
    other.training = False
    weight = frozen.weight.clone()
    with evaluation_mode([made]):
        assert not any(part.training for part in made.modules())
    assert [part.training for part in made.modules()] == [True, False, True, True, False]
    assert frozen.merged and torch.equal(frozen.weight, weight)


def test_an_error_inside_leaves_it_too() -> None:
    made = adapted()
    with pytest.raises(ZeroDivisionError), evaluation_mode([made]):
        raise ZeroDivisionError
    assert made.training and not made.merged


def test_parameters_of_one_storage_are_all_put_back() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.arange(4.0)
            self.first, self.second = (nn.Parameter(self.memory[i : i + 2], requires_grad=False) for i in (0, 2))

        def train(self, mode: bool = True) -> "Flat":
            torch._foreach_mul_([self.memory[1:]], 0.1 if mode else 0.3)
            super().train(mode)
            return self

    made = Flat()
    with evaluation_mode([made]):
        assert made.second.tolist() != [2.0, 3.0]
    assert made.memory.tolist() == [0.0, 1.0, 2.0, 3.0]


class Adapted(Tiny):
    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(Merging(5, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(layout: str, evaluates: bool) -> Any:
    session = session_of(Adapted(), config_of(layout, "train.global_batch=12"))
    found = []
    for _ in step_through(session, 3):
        found += [validate(session)["loss"]] if evaluates else []
    return parts_of(session), found


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp,sharding=grad_op"])
def test_adapters_learn_under_every_layout_whether_the_run_is_evaluated_or_not(pool: Pools, layout: str) -> None:
    """The check at the start evaluates, too; the ranks of a sharded layout have parts of both factors."""
    ((plain, _),) = pool(1).run(trained, "single", False)
    ((alone, measured),) = pool(1).run(trained, "single", True)
    expected = together([plain])
    assert all(torch.equal(value, expected[name]) for name, value in together([alone]).items())
    assert expected["0.b"].abs().min() > 0
    ranks = pool(2).run(trained, layout, True)
    found = together([parts for parts, _ in ranks])
    assert all(torch.allclose(found[name], value, rtol=1e-9) for name, value in expected.items())
    assert all(losses == pytest.approx(measured, rel=1e-9) for _, losses in ranks)
    assert len(set(measured)) == 3
