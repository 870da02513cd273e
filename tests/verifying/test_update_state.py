"""Optimizers of what a program builds, their numbers and their tensors."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from allranks.errors import TaskError
from allranks.verifying.recording import RunRecord, StepRecord
from allranks.verifying.update_state import (
    align_settings,
    built,
    is_number,
    names_of,
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


def test_schedulers_beside_optimizers_are_known_by_where_they_stand() -> None:
    one = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedulers = torch.optim.lr_scheduler.StepLR(one, 100), torch.optim.lr_scheduler.ReduceLROnPlateau(one)
    for some in ([one, *schedulers], {"a": one, "b": schedulers[0], "c": schedulers[1]}):
        made = nn.Linear(1, 1), some
        assert built(made) == made and optimizers_of(some) == [one]
    one.step()
    schedulers[0].step()
    found = states_of([one, *schedulers], {})
    numbers: dict[str, Any] = {name: value.tolist() for name, (_, value) in found.items()}
    assert (numbers["StepLR.last_epoch"], numbers["StepLR.step_size"], numbers["StepLR.rates"]) == (1.0, 100.0, [0.5])
    assert numbers["ReduceLROnPlateau 1.last_epoch"] == numbers["ReduceLROnPlateau 1.num_bad_epochs"] == 0.0
    assert not any("_step_count" in name for name in found)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (nn.Linear(1, 1), "build returns a Linear: return (model, optimizer); several of either in a dict or a list"),
        ((1, 2, 3), "build returns 3 values: return (model, optimizer); several of either in a dict or a list"),
        ((nn.Linear(1, 1), [nn.Linear(1, 1)]), "build returns a Linear as optimizer: return a torch.optim.Optimizer, "),
        ((nn.Linear(1, 1), {}), "build returns no optimizer: "),
    ],
)
def test_what_build_returns_in_place_of_a_model_and_its_optimizer_is_said(made: Any, said: str) -> None:
    with pytest.raises(TaskError) as raised:
        built(made)
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)


def test_settings_are_numbers_and_those_of_pairs() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=0.5, betas=(0.8, 0.95))
    found = settings_of(optimizer.param_groups[0])
    assert (found["lr"], found["betas.0"], found["betas.1"]) == (0.5, 0.8, 0.95)
    assert "params" not in found and "betas" not in found


@pytest.mark.parametrize("how", ["fused", "foreach", "capturable", "differentiable"])
def test_how_an_update_is_computed_is_no_setting(how: str) -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    some, others = (torch.optim.AdamW(parameters, lr=0.5, **options) for options in ({}, {how: True}))  # type: ignore[arg-type]
    assert settings_of(some.param_groups[0]) == settings_of(others.param_groups[0])
    assert settings_of(torch.optim.AdamW(parameters, amsgrad=True).param_groups[0])["amsgrad"] == 1.0


def test_settings_of_a_part_of_the_groups_stand_where_one_device_has_them() -> None:
    def step(**groups: float) -> StepRecord:
        """Parameters, one a letter -> the weight decay of their group."""
        return StepRecord(settings=[{"decay": value} for value in groups.values()], groups=[*map(frozenset, groups)])

    one = step(ab=0.1, cd=0.0, e=0.3)
    for mine, due in (
        (step(d=0.0), [{}, {"decay": 0.0}, {}]),
        (step(e=0.5, a=0.2), [{"decay": 0.2}, {}, {"decay": 0.5}]),
        (step(d=0.0, x=0.7), [{"decay": 0.0}, {"decay": 0.7}]),  # of what one device has not
        (step(c=0.0, b=0.1, e=0.3), [{"decay": 0.0}, {"decay": 0.1}, {"decay": 0.3}]),  # as many: by their places
        (StepRecord(settings=[{"decay": 0.0}]), [{"decay": 0.0}]),
    ):
        align_settings(RunRecord(steps=[mine]), RunRecord(steps=[one]))
        assert mine.settings == due
    late, other = step(d=0.0), step(cd=0.0, e=0.3)
    align_settings(RunRecord(resumed=RunRecord(steps=[late], first=1)), RunRecord(steps=[one, other]))
    assert late.settings == [{"decay": 0.0}, {}], "beside the same step of one device"


def test_names_of_a_group_are_those_of_its_parameters() -> None:
    model = nn.Linear(2, 1)
    named = dict(model.named_parameters()) | {"again": model.weight}
    assert names_of({"params": [model.weight, torch.zeros(1)]}, named) == {"weight", "again"}


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
