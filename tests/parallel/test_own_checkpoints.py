"""What a model checkpoints by torch's own function, and the context of its second run."""

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from allranks.parallel.own_checkpoints import keep_contexts, noted, runs_again

WHERE: ContextVar[str] = ContextVar("where", default="outside")
keep_contexts()


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_second_run_has_the_context_of_the_first(reentrant: bool) -> None:
    seen = list[Any]()

    def run(value: torch.Tensor) -> torch.Tensor:
        seen.append((WHERE.get(), runs_again()))
        WHERE.set(f"{WHERE.get()}, later")
        return torch.sin(torch.sin(value))

    before = WHERE.set("forward")
    value = torch.ones(3, requires_grad=True)
    found = checkpoint(run, value, use_reentrant=reentrant)
    assert WHERE.get() == "forward, later"  # the first run is the caller's own
    WHERE.reset(before)
    found.sum().backward()
    assert seen == [("forward", False), ("forward", True)]
    assert WHERE.get() == "outside" and not runs_again()
    again = torch.ones(3, requires_grad=True)
    torch.sin(torch.sin(again)).sum().backward()
    assert value.grad is not None and again.grad is not None and torch.equal(value.grad, again.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_begins_inside_is_noted(reentrant: bool) -> None:
    def run() -> torch.Tensor:
        found: torch.Tensor = checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=reentrant)
        return found

    with noted() as outer:
        with noted() as inner:
            seen = [inner.any]
            found = run()
        assert [*seen, inner.any, outer.any] == [False, True, False]
    found.sum().backward()
    run()
    assert not outer.any


def test_it_is_done_once() -> None:
    module: Any = torch.utils.checkpoint
    before = module._checkpoint_without_reentrant_generator, module.CheckpointFunction.forward
    keep_contexts()
    assert before == (module._checkpoint_without_reentrant_generator, module.CheckpointFunction.forward)
