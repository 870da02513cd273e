"""Where forwards and backwards of a block begin and end."""

import torch
from torch import nn

from allranks.parallel.block_watch import in_backward, watch_block
from allranks.parallel.recompute import recompute


def watched(block: nn.Module, value: torch.Tensor) -> list[str]:
    """What is told of `block` between two layers, in order with their operations."""
    told: list[str] = []
    before, behind = nn.Linear(2, 2), nn.Linear(2, 2)
    before.weight.register_hook(lambda _: told.append("before"))
    behind.weight.register_hook(lambda _: told.append("behind"))
    leave = watch_block(block, lambda: told.append("begins"), lambda: told.append("ends"))
    behind(block(before(value))).sum().backward()
    leave()
    block(value)  # tells nothing
    return told


def test_a_backward_is_between_those_of_what_is_around_the_block() -> None:
    assert watched(nn.Linear(2, 2), torch.ones(1, 2)) == ["begins", "ends", "behind", "begins", "ends", "before"]


def test_a_forward_that_a_backward_runs_again_is_none() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    again = list[bool]()
    block[1].register_forward_pre_hook(lambda *_: again.append(in_backward()))
    block.forward = recompute("block", block, block.forward)  # type: ignore[method-assign]
    told = watched(block, torch.ones(1, 2))
    assert told == ["begins", "ends", "behind", "begins", "ends", "before"]
    assert again[:2] == [False, True]


def test_a_block_whose_input_needs_no_gradient_has_no_end() -> None:
    told: list[str] = []
    block = nn.Linear(2, 2)
    watch_block(block, lambda: told.append("begins"), lambda: told.append("ends"))
    block(torch.ones(1, 2)).sum().backward()
    assert told == ["begins", "ends", "begins"]
    with torch.no_grad():
        block(torch.ones(1, 2))
    assert told[3:] == ["begins", "ends"]
