"""A forward whose backward never comes saves nothing, and one that takes gradients itself gets them all the same."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from allranks.stepping.forward_only import forward_only


def saved_by(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """(what it returns, whether the tensor between two exponentials is alive as long as that)."""
    watched: list[weakref.ref[torch.UntypedStorage]] = []

    def run() -> torch.Tensor:
        between = compute().exp()  # saves its output
        watched.append(weakref.ref(between.untyped_storage()))
        return between.exp().sum()

    found = forward_only(run)
    gc.collect()
    return found, watched[-1]() is not None


def test_nothing_is_saved_and_the_loss_has_a_gradient_still() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    found, alive = saved_by(lambda: layer(x))
    assert found.requires_grad and not alive
    assert torch.equal(found, layer(x).exp().exp().sum())
    kept = layer(x).exp()
    storage, loss = weakref.ref(kept.untyped_storage()), kept.exp().sum()
    del kept
    assert storage() is not None and loss.requires_grad, "without it autograd keeps what it needs"


@pytest.mark.parametrize("catches", [False, True])
def test_who_takes_gradients_itself_is_run_again_with_everything_saved(catches: bool) -> None:
    x, calls = torch.randn(5, requires_grad=True), list[int]()

    def penalised() -> torch.Tensor:
        calls.append(1)
        try:
            (gradient,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        except RuntimeError:
            if not catches:
                raise
            return torch.zeros(())
        return gradient.square().sum()

    assert torch.equal(forward_only(penalised), x.detach().exp().square().sum())
    assert len(calls) == 2


def test_transforms_of_functions_are_run_again_too() -> None:
    x = torch.randn(5)

    def derived() -> torch.Tensor:
        gradient: torch.Tensor = torch.func.grad(lambda value: value.exp().sum())(x)
        return gradient

    assert torch.equal(forward_only(derived), x.exp())


def test_a_fault_of_the_model_is_raised_once() -> None:
    calls = list[int]()

    def broken() -> None:
        calls.append(1)
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        forward_only(broken)
    assert calls == [1]
