"""FSDP2 unit by unit: what is cut, what is gathered when, and what stays."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from allranks.layout import Layout
from allranks.parallel.held_back import parameter_groups
from allranks.parallel.initial import Placer, Source
from allranks.parallel.mesh import build_mesh
from allranks.parallel.precision import choose_precision
from allranks.parallel.shard import reshard_all, shard
from tests.distributed.pool import Pools
from tests.distributed.tasks import MODELS

pytestmark = pytest.mark.distributed

UNITS = [("blocks.0", "blocks.2"), ("blocks.1",)]


def spread(kind: str, layout: Layout, placer: Placer | None = None) -> nn.Module:
    torch.manual_seed(0)
    module = MODELS[kind]()
    policy = choose_precision("float32", None, "cpu").fsdp_policy()
    shard(module, UNITS, build_mesh(layout, "cpu"), policy, placer or Placer(torch.device("cpu"), Source()))
    return module


def whole(module: nn.Module) -> list[str]:
    """Names of parameters that are on this rank as a whole."""
    return [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]


def look(kind: str, layout: Layout) -> Any:
    module = spread(kind, layout)
    at_rest = whole(module)
    module(torch.ones(2, 5)).sum()
    forwarded = whole(module)
    reshard_all(module)
    resharded = whole(module)
    module(torch.ones(2, 5)).sum().backward()
    return at_rest, forwarded, resharded, whole(module)


def test_scalars_stay_whole_and_all_else_is_cut(pool: Pools) -> None:
    scalars = ["blocks.0.gain", "blocks.1.gain"]  # the third block shares the first's
    for at_rest, _, resharded, trained in pool(2).run(look, "scalars", Layout(dp_shard=2)):
        assert at_rest == resharded == trained == scalars


def test_what_is_left_gathered_depends_on_the_sharding(pool: Pools) -> None:
    """After a forward without backward the root is whole, and under grad_op everything; then reshard_all cuts it."""
    names = [name for name, _ in MODELS["sharing"]().named_parameters()]
    for layout, left in (
        (Layout(dp_shard=2), [name for name in names if not name.startswith("blocks")]),
        (Layout(dp_shard=2, sharding="grad_op"), names),
        (Layout(dp_replicate=2, sharding="none"), names),
    ):
        for at_rest, forwarded, resharded, trained in pool(2).run(look, "sharing", layout):
            assert (at_rest, forwarded, resharded, trained) == ([], left, [], [])


def count_units() -> dict[str, int]:
    module = spread("sharing", Layout(dp_shard=2))
    return dict(Counter(type(member).__name__ for member in module.modules() if "FSDP" in type(member).__name__))


def test_every_unit_and_the_root_is_wrapped(pool: Pools) -> None:
    assert pool(2).run(count_units)[0] == {"FSDPBlock": 3, "FSDPStack": 1}


def measure_held() -> list[int]:
    """Whole parameters still held by the placer while each unit is placed."""
    held: list[int] = []
    placer = Placer(torch.device("cpu"), Source(dist.group.WORLD, 0, dist.get_rank() == 0))
    place = placer.place

    def counting(module: nn.Module) -> None:
        held.append(sum(pair[1].dim() > 0 for pair in placer._placed.values()))
        place(module)

    placer.place = counting  # type: ignore[method-assign]
    spread("scalars", Layout(dp_shard=2), placer)
    return held


def test_cut_units_are_not_kept_whole(pool: Pools) -> None:
    """Two members of the first unit, then the second unit, then the root: whole parameters of the same unit only."""
    first, second, third, root = pool(2).run(measure_held)[1]
    assert first == 0
    assert second > 0
    assert (third, root) == (0, 0)


class InPlace(nn.Module):
    """Its blocks and its end return views, which its forward and its loss change in place."""

    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)  # three dims: a matrix product, seen as three
            x += 1.0
        return self.kind(self.last(x))


@dataclass
class Held:
    """Whose tensor is taken out as that of a list of one."""

    value: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self.value


def as_list(value: torch.Tensor) -> list[torch.Tensor]:
    return [value]


KINDS = {"list": as_list, "dataclass": Held}


def change_in_place(dims: tuple[int, ...], kind: str) -> tuple[bool, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module, policy = InPlace(KINDS[kind]), choose_precision("float32", None, "cpu").fsdp_policy()
    placer = Placer(torch.device("cpu"), Source())
    shard(module, UNITS, build_mesh(Layout(dp_shard=2), "cpu"), policy, placer)
    (output,) = module(torch.ones(*dims))
    output /= 2.0
    output.sum().backward()
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.full_tensor()
    return output._base is None, found


@pytest.mark.parametrize(("dims", "kind"), [((4, 5), "list"), ((2, 4, 5), "list"), ((2, 4, 5), "dataclass")])
def test_what_is_changed_in_place_still_learns(pool: Pools, dims: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    module = InPlace(as_list)
    (output,) = module(torch.ones(*dims))
    (output / 2.0).sum().backward()
    for own_memory, found in pool(2).run(change_in_place, dims, kind):
        assert own_memory
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


class Layers(nn.Module):
    """Four units and the rest; of the units one may be passed over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.last = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, without: int | None = None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == without else block(x)
        return self.last(x)  # type: ignore[no-any-return]


def sharded_layers(prefetch: int | None) -> Layers:
    module = Layers()
    units = [(f"blocks.{index}",) for index in range(4)]
    policy = choose_precision("float32", None, "cpu").fsdp_policy()
    mesh = build_mesh(Layout(dp_shard=2, prefetch=prefetch), "cpu")
    shard(module, units, mesh, policy, Placer(torch.device("cpu"), Source()))
    return module


def look_at_order(prefetch: int | None) -> tuple[str, str]:
    """What a forward and a backward do: g0 gathers the first unit, c0 computes it."""
    module, seen = sharded_layers(prefetch), list[str]()
    module(torch.ones(2, 5)).sum().backward()

    def told(group: Any, index: int) -> Callable[..., None]:
        unshard = group.unshard

        def gather(*arguments: Any, **named: Any) -> None:
            if not group.is_unsharded and group._all_gather_result is None:
                seen.append(f"g{index}")
            unshard(*arguments, **named)

        return gather

    for index, block in enumerate(module.blocks):
        (group,) = parameter_groups([block])
        group.unshard = told(group, index)
        block.register_forward_pre_hook(lambda *_, index=index: seen.append(f"c{index}"))
        block.register_forward_hook(
            lambda _, __, output, index=index: output.register_hook(lambda _: seen.append(f"c{index}")) and None
        )
    loss = module(torch.ones(2, 5)).sum()
    forward = " ".join(seen)
    seen.clear()
    loss.backward()
    return forward, " ".join(seen)


@pytest.mark.parametrize(
    ("prefetch", "forward", "backward"),
    [
        (None, "g0 c0 g1 c1 g2 c2 g3 c3", "g3 g2 c3 g1 c2 g0 c1 c0"),
        (1, "g0 g1 c0 g2 c1 g3 c2 c3", "g3 g2 c3 g1 c2 g0 c1 c0"),
        (2, "g0 g1 g2 c0 g3 c1 c2 c3", "g3 g2 g1 c3 g0 c2 c1 c0"),
        (9, "g0 g1 g2 g3 c0 c1 c2 c3", "g3 g2 g1 g0 c3 c2 c1 c0"),
    ],
)
def test_units_are_gathered_as_far_ahead_as_the_layout_says(
    pool: Pools, prefetch: int | None, forward: str, backward: str
) -> None:
    assert pool(2).run(look_at_order, prefetch) == [(forward, backward)] * 2


def train_layers(prefetch: int | None, without: tuple[int | None, ...]) -> list[float]:
    module: nn.Module = Layers() if prefetch is None else sharded_layers(prefetch)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.01), []
    for number, left in enumerate(without):
        loss = module(torch.full((2, 5), 1.0 + number / 8), left).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_what_is_gathered_ahead_and_passed_over_has_new_values_in_the_next_step(pool: Pools) -> None:
    without = (None, 2, None, 0, 3, None)
    expected = train_layers(None, without)
    assert len(set(expected)) == 6
    for prefetch in (1, 3):
        for found in pool(2).run(train_layers, prefetch, without):
            assert found == pytest.approx(expected, rel=1e-5)
