"""Who each tensor is, in one process and on every rank of a mesh."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.layout import Layout
from allranks.parallel.identity import identify
from allranks.parallel.initial import Placer, Source
from allranks.parallel.mesh import Mesh, build_mesh
from allranks.parallel.precision import choose_precision
from allranks.parallel.shard import shard
from allranks.parameter_map import Box, Entry
from tests.distributed.pool import Pools
from tests.distributed.tasks import MODELS

ALONE = Mesh(Layout(kind="single"), 0, None)


class Kinds(nn.Module):
    """A parameter, a frozen one, a tied pair, and buffers that are saved and not."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3, bias=False)
        self.b = nn.Linear(2, 3)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)


def test_every_tensor_of_one_process() -> None:
    entries, tensors = identify({"": Kinds()}, {}, ALONE)
    assert list(entries) == list(tensors) == ["a.weight", "b.weight", "b.bias", "count", "scratch"]
    assert entries["a.weight"] == Entry("a.weight", (3, 2), "float32", Box((0, 0), (3, 2)), holders=(0,))
    assert {name: entry.alias_of for name, entry in entries.items() if entry.alias_of} == {"b.weight": "a.weight"}
    assert [name for name, entry in entries.items() if entry.trainable] == ["a.weight", "b.weight"]
    assert [name for name, entry in entries.items() if entry.kind == "buffer"] == ["count", "scratch"]
    assert [name for name, entry in entries.items() if not entry.persistent] == ["scratch"]
    assert (entries["count"].shape, entries["count"].dtype, entries["count"].box) == ((), "int64", Box((), ()))


def test_names_of_several_modules_are_told_apart_and_a_shared_tensor_is_one() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.bias = first.bias
    entries, tensors = identify({"g": first, "d": second}, {}, ALONE)
    assert list(entries) == ["g.weight", "g.bias", "d.weight", "d.bias"]
    assert entries["d.bias"].alias_of == "g.bias"
    assert tensors["d.bias"] is tensors["g.bias"]


def test_a_buffer_is_what_the_module_has_now() -> None:
    """A forward may put a new tensor in a buffer's place; a checkpoint of the old one would be wrong for ever."""
    module = Kinds()
    _, tensors = identify({"": module}, {}, ALONE)
    module.count = module.count + 5
    assert tensors["count"].item() == 5
    assert tensors["a.weight"] is module.a.weight


def test_a_shared_module_has_every_name_and_one_owner() -> None:
    shared = nn.Linear(2, 2)
    entries, tensors = identify({"": nn.ModuleList([shared, nn.ReLU(), shared])}, {}, ALONE)
    assert {name: entry.alias_of for name, entry in entries.items()} == {
        "0.weight": None,
        "0.bias": None,
        "2.weight": "0.weight",
        "2.bias": "0.bias",
    }
    assert len(tensors) == 4


def look(layout: Layout) -> Any:
    mesh = build_mesh(layout, "cpu")
    module = MODELS["sharing"]()
    units = [("blocks.0", "blocks.2"), ("blocks.1",)]
    policy = choose_precision("float32", None, "cpu").fsdp_policy()
    shard(module, units, mesh, policy, Placer(torch.device("cpu"), Source()))
    entries, tensors = identify({"": module}, {"": units}, mesh)
    local = {name: tuple(tensor.to_local().shape) for name, tensor in tensors.items()}  # type: ignore[attr-defined]
    return entries, local


@pytest.mark.distributed
def test_boxes_tile_each_tensor_and_say_what_is_held(pool: Pools) -> None:
    for layout in (
        Layout(dp_shard=3),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(dp_replicate=2, sharding="none"),
        Layout(dp_shard=2, cp=2),
        Layout(dp_replicate=2, cp=2, sharding="none"),
    ):
        ranks = pool(layout.world_size).run(look, layout)
        for name, whole in ranks[0][0].items():
            boxes: dict[Box, set[int]] = {}
            for rank, (entries, local) in enumerate(ranks):
                entry = entries[name]
                assert entry.shape == whole.shape
                assert entry.box.shape == local[name]
                assert rank in entry.holders and list(entry.holders) == sorted(entry.holders)
                boxes.setdefault(entry.box, set()).add(rank)
                assert set(entry.holders) >= boxes[entry.box]
            assert all(
                ranks[rank][0][name].holders == tuple(sorted(held)) for box, held in boxes.items() for rank in held
            )
            some = [box for box in boxes if box.num_elements]
            assert sum(box.num_elements for box in some) == Box.whole(whole.shape).num_elements
            assert not any(a.intersect(b) for a in some for b in some if a is not b)


@pytest.mark.distributed
def test_placements_and_units_are_named(pool: Pools) -> None:
    entries, _ = pool(4).run(look, Layout(dp_replicate=2, dp_shard=2))[3]
    assert entries["first.weight"].placements == {"dp_replicate": "replicate", "dp_shard": "shard(0)"}
    assert entries["first.weight"].unit == ""
    assert entries["blocks.1.linear.weight"].unit == "blocks.1"
    assert entries["blocks.0.gain"].unit == entries["blocks.2.gain"].unit == "blocks.0+blocks.2"
    assert entries["blocks.2.linear.weight"].alias_of == "blocks.0.linear.weight"
    entries, _ = pool(4).run(look, Layout(dp_shard=2, cp=2))[3]
    assert entries["first.weight"].placements == {"dp_shard": "shard(0)", "cp": "shard(0)"}
    (entries, _), *_ = pool(3).run(look, Layout(dp_shard=3))
    assert entries["first.weight"].placements == {"dp_shard": "shard(0)"}
