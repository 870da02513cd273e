"""An optimizer of the user's own kind, over whole and sharded parameters."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import allranks
from allranks.errors import CheckpointError
from allranks.training.own.optimizer import group_settings, restore_group_settings
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, refusal


def groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, Any]]:
    return [(len(group["params"]), group.get("fused")) for group in optimizer.param_groups]


def test_fused_where_it_works_and_nobody_said_otherwise(pool: Pools) -> None:
    def case() -> list[Any]:
        with allranks.join() as world:
            model = world.parallelize(Net())
            kinds: list[Any] = [AdamW, Adam, SGD, Adagrad, RMSprop]
            made = [groups(world.optimizer(model, kind, lr=0.1)) for kind in kinds]
            made += [
                groups(world.optimizer(model, AdamW, lr=0.1, **chosen))
                for chosen in ({"fused": False}, {"foreach": True})
            ]
            return [*made, groups(world.optimizer(model, Adam, lr=torch.tensor(0.1), capturable=False))]

    (found,) = pool(1).run(case)
    many = len(list(Net().parameters()))
    assert found == [[(many, fused)] for fused in (True, True, True, None, None, False, None, None)]


def test_sharded_and_whole_parameters_are_parted(pool: Pools) -> None:
    def case() -> list[Any]:
        with allranks.join(layout="dp_shard=2") as world:
            model = world.parallelize(Net())

            def decayed(parameters: list[Any], lr: float) -> AdamW:
                matrices = [p for p in parameters if p.dim() > 1]
                rest = [p for p in parameters if p.dim() <= 1]
                parts: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
                return AdamW(parts, lr=lr)

            found = []
            for kind in (AdamW, SGD, RMSprop, decayed):
                optimizer = world.optimizer(model, kind, lr=0.1)
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                found.append(
                    [
                        (*sizes, group.get("weight_decay"))
                        for sizes, group in zip(groups(optimizer), optimizer.param_groups, strict=True)
                    ]
                )
            return found

    many = len(list(Net().parameters()))
    matrices = sum(p.dim() > 1 for p in Net().parameters())
    for found in pool(2).run(case):
        assert found == [
            [(many - 1, True, 0.01), (1, True, 0.01)],
            [(many - 1, None, 0), (1, True, 0)],
            [(many - 1, None, 0), (1, None, 0)],
            [(matrices, True, 0.01), (many - matrices - 1, True, 0.0), (1, True, 0.0)],
        ]


def test_what_is_no_optimizer_of_the_model_is_refused() -> None:
    with allranks.join() as world:
        model = world.parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        assert "made a list: expected a torch optimizer" in refusal(lambda: world.optimizer(model, list))  # type: ignore[arg-type]
        stranger = nn.Linear(2, 2)
        assert "not the model's parameters" in refusal(
            lambda: world.optimizer(model, lambda p: SGD(stranger.parameters()))
        )
        assert "leaves out 3 trainable" in refusal(lambda: world.optimizer(model, lambda p: SGD(p[:1])))
        assert refusal(lambda: world.optimizer(model, SGD, rate=1)).startswith("TypeError")


def test_settings_find_their_group_again_under_another_layout(pool: Pools) -> None:
    def settings(layout: str) -> list[dict[str, Any]]:
        with allranks.join(layout=layout) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, AdamW, lr=0.1, betas=(0.8, 0.9))
            optimizer.param_groups[0]["lr"] = 0.025
            for group in optimizer.param_groups[1:]:
                group["lr"] = 0.025
            return group_settings(world._ground.models.trained, optimizer)

    def restored(layout: str, kept: list[dict[str, Any]]) -> tuple[list[Any], list[str]]:
        with allranks.join(layout=layout) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, AdamW, lr=0.1)
            told = restore_group_settings(world._ground.models.trained, optimizer, kept)
            return [(group["lr"], group["betas"]) for group in optimizer.param_groups], told

    kept = pool(2).run(settings, "dp_shard=2")[0]
    assert [len(saved["parameters"]) for saved in kept] == [len(list(Net().parameters())) - 1, 1]
    told = ["betas is [0.8, 0.9], as the checkpoint has it", "lr is 0.025, as the checkpoint has it"]
    assert pool(1).run(restored, "single", kept) == [([(0.025, (0.8, 0.9))], told)]
    assert pool(2).run(restored, "dp_shard=2", kept) == [([(0.025, (0.8, 0.9))] * 2, told)] * 2
    kept[1]["settings"]["lr"] = 0.5
    with pytest.raises(CheckpointError, match=r"other parameter groups: .* had different settings"):
        pool(1).run(restored, "single", kept)
