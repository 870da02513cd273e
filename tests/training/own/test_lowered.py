"""Forwards of an own loop's models under its precision: what runs in the lower type, and what comes out."""

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks
from allranks.parallel.precision import choose_precision
from allranks.training.own.lowered import Lowered
from tests.distributed.pool import Pools


class Seeing(nn.Module):
    """Tells in which type its layer has multiplied; fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        product = self.linear(x)
        self.seen.append(product.dtype)
        if self.fails:
            raise ValueError("as it was told to")
        return {"product": product, "double": x.double()}


def lowered() -> Seeing:
    module = Seeing()
    Lowered(choose_precision("float16", None, "cpu"), "cpu").watch(module)
    return module


def test_a_forward_multiplies_in_float16_and_gives_float32() -> None:
    module = lowered()
    output = module(torch.ones(2, 4))
    assert module.seen == [torch.float16]
    assert [tensor.dtype for tensor in output.values()] == [torch.float32, torch.float64]
    assert not torch.is_autocast_enabled("cpu"), "what follows is the user's own"
    assert list(inspect.signature(module.forward).parameters) == ["x"]


def test_a_forward_that_fails_leaves_autocast() -> None:
    module = lowered()
    module.fails = True
    for _ in range(2):
        with pytest.raises(ValueError, match="as it was told to"):
            module(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")
    module.fails = False
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.ones(2, 4))
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16, "what was around it is there again"
    assert module.seen == [torch.float16] * 3


def test_an_error_before_a_forward_is_raised_as_it_is() -> None:
    module = lowered()

    def refuse(*_: object) -> None:
        raise ValueError("not this call")

    handle = module.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="not this call"):
        module(torch.ones(2, 4))
    handle.remove()
    module(torch.ones(2, 4))
    assert module.seen == [torch.float16] and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["ddp", "dp_shard=2"])
def test_every_model_of_a_world_computes_in_its_precision(
    pool: Pools, tmp_path: Path, layout: str, precision: str
) -> None:
    def case(folder: str) -> list[list[torch.dtype]]:
        with allranks.join(layout=layout, precision=precision, run=folder) as world:
            trained, frozen = Seeing(), Seeing().requires_grad_(False)
            called = [world.parallelize(trained), world.parallelize(frozen)]
            optimizer = world.optimizer(called[0], torch.optim.SGD, lr=0.1)
            data = [torch.full((4,), float(index)) for index in range(8)]
            for batch in world.stream(data, global_batch=4, steps=1):
                outputs = [model(batch)["product"] for model in called]
                assert all(output.dtype is torch.float32 for output in outputs)
                world.backward((outputs[0] - outputs[1]).square().sum(), targets=len(batch))
                world.step(optimizer)
            found = world.evaluate(data, lambda batch: {"sum": (called[0](batch)["product"].sum(), 1)}, batch=4)
            assert list(found) == ["sum"]
            assert all(parameter.dtype is torch.float32 for parameter in trained.parameters())
            return [trained.seen, frozen.seen]

    for trained, frozen in pool(2).run(case, str(tmp_path)):
        assert set(trained) == set(frozen) == {getattr(torch, precision)}
        assert len(trained) > len(frozen) == 1


def test_bfloat16_is_the_loop_under_autocast_and_shards_travel_rounded_where_asked(pool: Pools, tmp_path: Path) -> None:
    """Bit by bit; what is gathered in bfloat16 is what autocast would have made of it, here where all is a product."""

    def train(folder: str, layout: str, mine: bool, **keys: Any) -> tuple[list[float], list[torch.dtype]]:
        seen: list[torch.dtype] = []
        precision = "float32" if mine else "bfloat16"
        with allranks.join(layout=layout, precision=precision, run=folder, **keys) as world:
            torch.manual_seed(0)
            bare = nn.Linear(4, 4, bias=False)
            model = world.parallelize(bare)
            bare.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
            optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)
            losses = []
            for batch in world.stream([torch.full((4,), float(index)) for index in range(8)], global_batch=4, steps=3):
                with torch.autocast("cpu", torch.bfloat16) if mine else nullcontext():
                    output = model(batch)
                loss = output.float().square().sum() / 64
                losses.append(loss.item())
                world.backward(loss, targets=len(batch))
                world.step(optimizer)
        return losses, seen

    def case(folder: str) -> list[tuple[list[float], list[torch.dtype]]]:
        found = [
            train(f"{folder}/{layout}-{mine}", layout, mine) for layout in ("ddp", "fsdp") for mine in (True, False)
        ]
        return [*found, train(f"{folder}/gathered", "fsdp", False, gather="bfloat16")]

    for mine, ours, my_shards, our_shards, gathered in pool(2).run(case, str(tmp_path)):
        assert mine == ours and my_shards == our_shards and len(set(mine[0])) == 3
        assert gathered[0] == our_shards[0]
        assert set(our_shards[1]) == {torch.float32} and set(gathered[1]) == {torch.bfloat16}


def test_rules_place_modules_of_a_loop_as_those_of_a_task(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses = []
    for folder, keys in (("single", {}), ("placed", {"layout": "placement", "placement": {"0": "cpu:1"}})):
        with allranks.join(run=tmp_path / folder, **keys) as world:  # type: ignore[arg-type]
            torch.manual_seed(0)
            model = world.parallelize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
            optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
            for batch in world.stream([torch.full((4,), index / 8) for index in range(8)], global_batch=4, steps=3):
                loss = model(batch).square().sum()
                losses.append(loss.item())
                world.backward(loss, targets=len(batch))
                world.step(optimizer)
    assert losses[:3] == losses[3:] and len(set(losses)) == 3
    assert "cpu:1 holds" in "".join(capfd.readouterr())
