"""What a model checkpoints by torch's own function, and the context of its second run."""

from contextvars import Context, ContextVar, copy_context
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.parallel import own_checkpoints
from allranks.parallel import recompute as recomputing
from allranks.parallel.own_checkpoints import keep_contexts, noted, runs_again
from allranks.parallel.recompute import recompute

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


def test_what_a_layout_recomputes_has_its_context_and_keeps_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, kept = list[Any](), list[Context]()

    def copied() -> Context:
        kept.append(copy_context())
        return kept[-1]

    for module in (own_checkpoints, recomputing):
        monkeypatch.setattr(module, "copy_context", copied, raising=False)
    block = nn.Tanh()

    def run(value: torch.Tensor) -> torch.Tensor:
        seen.append((WHERE.get(), runs_again()))
        return torch.sin(torch.sin(value))

    before = WHERE.set("forward")
    found = recompute("block", block, run)(torch.ones(3, requires_grad=True))
    WHERE.reset(before)
    found.sum().backward()
    assert seen == [("forward", False), ("forward", True)] and len(kept) == 1


def test_it_is_done_once() -> None:
    module: Any = torch.utils.checkpoint
    before = module._checkpoint_without_reentrant_generator, module.CheckpointFunction.forward
    keep_contexts()
    assert before == (module._checkpoint_without_reentrant_generator, module.CheckpointFunction.forward)
