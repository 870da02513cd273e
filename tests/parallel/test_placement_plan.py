"""Which module goes where: rules, their refusals, and the balance."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.mesh import Mesh
from allranks.parallel.placement import named_tensors
from allranks.parallel.placement_plan import begin_placement, plan_balanced, plan_by_rules
from allranks.parallel.share import share_of
from tests.distributed.tasks import MODELS, Tied, with_scalars
from tests.parallel.spreads import spread

Rules = Mapping[str, str]


def placed(model: nn.Module, rules: Rules) -> dict[str, str]:
    """Name -> device, of parameters and buffers."""
    pairs = tuple(rules.items())
    share = share_of(Layout(kind="placement", placement=pairs))
    return {name: place.name for name, place in plan_by_rules({"": model}, pairs, share).items()}


def balanced(model: nn.Module, num_devices: int = 2, **others: nn.Module) -> dict[str, str]:
    """The same, where nothing is ruled."""
    share = share_of(Layout(kind="placement"))
    used = tuple(share.find(f"cpu:{index}") for index in range(num_devices))
    share = replace(share, used=used, home=used[-1])
    return {name: place.name for name, place in plan_balanced(others or {"": model}, (), share).items()}


def test_a_rule_names_modules_or_parameters_and_all_below() -> None:
    model = MODELS["scalars"]()
    found = placed(model, {"blocks.[12]": "cpu:1", "blocks.0.linear.bias": "cpu:2", "last.*": "cpu:3"})
    by_device: dict[str, set[str]] = {}
    for name, device in found.items():
        by_device.setdefault(device, set()).add(name)
    assert by_device["cpu:2"] == {"blocks.0.linear.bias"}
    assert by_device["cpu:3"] == {"last.weight", "last.bias"}
    assert {"blocks.1.norm.weight", "blocks.2.linear.bias", "blocks.1.gain"} <= by_device["cpu:1"]
    assert {"first.weight", "blocks.0.linear.weight", "blocks.0.norm.bias"} <= by_device["cpu:0"]
    assert "blocks.0.gain" in by_device["cpu:1"], "it is that of blocks.2 as well"


def test_buffers_go_with_their_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False))
    found = placed(model, {"1.weight": "cpu:1", "1.bias": "cpu:1", "2": "cpu:2"})
    assert {found[f"1.{leaf}"] for leaf in ("running_mean", "running_var", "num_batches_tracked")} == {"cpu:1"}
    assert found["2.running_mean"] == "cpu:2"
    assert found["0.weight"] == "cpu:0"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"block.1": "cpu:1"},
            "'block.1' matches no parameter or buffer, and no module that has some; the nearest are blocks.1",
        ),
        (
            {"zzz": "cpu:1"},
            "'zzz' matches no parameter or buffer, and no module that has some; there are embedding, blocks,",
        ),
        (
            {"blocks.*": "cpu:1", "*.linear": "cpu:2"},
            "'blocks.*' = cpu:1 and '*.linear' = cpu:2 both name blocks.0.linear.weight: let one of them name it",
        ),
        (
            {"embedding": "cpu:0", "head": "cpu:1"},
            "puts embedding.weight on cpu:0 and head.weight on cpu:1, and these are one shared tensor: give both one",
        ),
        ({"head": "cpu:8"}, "names device 'cpu:8', and this process has cpu:0 to cpu:7"),
    ],
)
def test_what_is_refused(rules: Rules, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        placed(Tied(), rules)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_equal_rules_and_one_rule_for_a_shared_tensor_are_no_conflict() -> None:
    assert (
        placed(Tied(), {"head": "cpu:1", "*.linear": "cpu:2", "blocks.*.linear": "cpu:2"})["embedding.weight"]
        == "cpu:1"
    )


def test_the_fullest_device_holds_as_little_as_can_be() -> None:
    model = nn.Sequential(*(nn.Linear(1, width) for width in (5, 1, 1, 1, 6)))
    assert [balanced(model)[f"{index}.weight"] for index in range(5)] == ["cpu:0"] * 3 + ["cpu:1"] * 2
    assert [balanced(model, 3)[f"{index}.weight"] for index in range(5)] == [
        "cpu:0",
        "cpu:1",
        "cpu:1",
        "cpu:1",
        "cpu:2",
    ]
    assert set(balanced(nn.Linear(3, 3), 3).values()) == {"cpu:0"}, "a part is not cut"


def test_a_shared_tensor_counts_once_and_lies_with_its_first_module() -> None:
    found = balanced(Tied())
    assert found["head.weight"] == found["embedding.weight"] == "cpu:0"
    assert {device for name, device in found.items() if name.startswith("blocks")} == {"cpu:1"}


def test_blocks_stay_together_and_several_models_follow_each_other() -> None:
    devices: dict[str, set[str]] = {}
    for name, device in balanced(with_scalars(), 3).items():
        if name.startswith("blocks.") and not name.endswith("gain"):
            devices.setdefault(name[: len("blocks.0")], set()).add(device)
    assert all(len(found) == 1 for found in devices.values()) and set.union(*devices.values()) > {"cpu:1"}
    found = balanced(nn.Linear(1, 1), 2, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    assert (found["a.weight"], found["b.weight"]) == ("cpu:0", "cpu:1")


def test_every_tensor_of_every_model_has_a_place() -> None:
    for build in MODELS.values():
        model = build()
        assert balanced(model).keys() == {name for name, _ in named_tensors({"": model})}
        assert set(balanced(model).values()) == {"cpu:0", "cpu:1"}


def test_what_lies_where_is_said() -> None:
    rules = (("first", "cpu:1"), ("blocks.1", "cpu:1"))
    one, other, loss, nothing = spread(with_scalars, Layout(kind="placement", placement=rules)).decisions
    assert one.what == "cpu:0 holds 660 B (blocks.0, blocks.2, last)"
    assert one.because == "what no rule names lies on the first device"
    assert str(other) == "cpu:1 holds 452 B (first, blocks.1), because [layout.placement] says so of first, blocks.1"
    assert loss.what == "loss() gets output and batch on cpu:1"
    assert loss.because == "that is the last device in use, where the output mostly is already"
    assert nothing.what == "placement changes nothing here"
    assert nothing.because.startswith("no GPU is in use: cpu:0, cpu:1 and so on are names for one memory")
    with pytest.raises(LayoutError, match=r"puts blocks\.1 on several: give each block one device"):
        split = (("blocks.1.norm", "cpu:1"),)
        spread(with_scalars, Layout(kind="placement", placement=split, compile="block"))


def test_ddp_takes_devices_of_one_type() -> None:
    layout = Layout(kind="placement", dp_replicate=2, placement=(("0", "cuda:0"), ("1", "cpu")))
    mesh = Mesh(layout, 0, None, share=share_of(layout, (torch.device("cuda:0"),)))
    with pytest.raises(LayoutError, match=r"takes devices of one type, and .* names cpu and cuda"):
        begin_placement({"": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))}, mesh, torch.device("cuda:0"), (), [])
