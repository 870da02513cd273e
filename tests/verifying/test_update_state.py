"""Optimizers of what a program builds, their numbers and their tensors."""

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from allranks.verifying.update_state import (
    is_number,
    optimizers_of,
    scaler_states,
    scalers_told,
    settings_of,
    states_of,
)


def test_optimizers_are_found_in_what_build_returns() -> None:
    one = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert optimizers_of(one) == optimizers_of({"a": one}) == optimizers_of([one]) == [one]
    assert is_number(1) and is_number(torch.ones(1, 1)) and not is_number(torch.ones(2)) and not is_number("1")


def test_settings_are_numbers_and_those_of_pairs() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=0.5, betas=(0.8, 0.95))
    found = settings_of(optimizer.param_groups[0])
    assert (found["lr"], found["betas.0"], found["betas.1"]) == (0.5, 0.8, 0.95)
    assert "params" not in found and "betas" not in found


def test_states_have_the_first_name_of_their_parameter() -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = states_of({"g": optimizer}, {"weight": layer.weight, "tied": layer.weight})
    assert list(found) == ["momentum_buffer.weight"]
    assert torch.equal(found["momentum_buffer.weight"].value, torch.ones(1, 2))


def test_scalers_are_known_by_what_they_are_called_for() -> None:
    scalers: list[GradScaler] = []
    first, second, unused = (torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1) for _ in range(3))
    optimizer = torch.optim.SGD([weight := torch.ones(1, requires_grad=True)], lr=0.1)
    with scalers_told(scalers):
        for scaler in (first, second, first):
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers == [first, second] and unused not in scalers
    found = {name: float(value) for name, (_, value) in scaler_states(scalers).items()}
    assert found["GradScaler.scale"] == 16.0 and found["GradScaler 1.scale"] == 8.0
    assert found["GradScaler._growth_tracker"] == 0.0
    first.update(2.0)
    assert scalers == [first, second], "nothing is told outside"
    assert scaler_states([torch.amp.GradScaler("cpu", enabled=False)]) == {}
