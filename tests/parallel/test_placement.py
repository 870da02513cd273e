"""Modules on several devices: what travels where, and that the user's code need not know."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from allranks.layout import Layout
from allranks.parallel import placement
from allranks.parallel.mesh import Mesh
from allranks.parallel.share import share_of
from allranks.parallel.spread import Spread
from allranks.parallel.transfers import Transfer
from tests.parallel.spreads import spread

Ways = list[tuple[str, str, str, bool]]


def on(build: Any, rules: dict[str, str], **modes: Any) -> Spread:
    return spread(build, Layout(kind="placement", placement=tuple(rules.items()), **modes))


def ways(found: Any) -> Ways:
    return [(one.module, one.source, one.target, one.backward) for one in found]


def run(made: Spread, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[Transfer]]:
    """The output, and the transfers of forward and backward."""
    assert made.placement is not None
    with made.placement.recorded() as found:
        output = made.modules[""](*args, **kwargs)
        output.square().sum().backward()
    return output.detach(), list(found)


def alike(build: Any, made: Spread, *args: Any, **kwargs: Any) -> list[Transfer]:
    """The transfers; AssertionError where outputs or gradients are not those of the module alone, to the bit."""
    output, found = run(made, *args, **kwargs)
    alone = spread(build).modules[""]
    expected = alone(*args, **kwargs)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    for (name, one), other in zip(made.trainable().items(), alone.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad)), name
    return found


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


def test_a_tensor_travels_only_where_devices_differ() -> None:
    made = on(chain, {"[01]": "cpu:0", "[23]": "cpu:1"})
    found = alike(chain, made, torch.ones(2, 3))
    assert ways(found) == [
        ("0", "cpu:1", "cpu:0", False),
        ("2", "cpu:0", "cpu:1", False),
        ("2", "cpu:1", "cpu:0", True),
    ]
    assert [one.num_bytes for one in found] == [24] * 3


def test_the_output_goes_where_the_loss_is() -> None:
    made = on(chain, {"[01]": "cpu:1", "[23]": "cpu:0"})
    assert ways(alike(chain, made, torch.ones(2, 3))) == [
        ("2", "cpu:1", "cpu:0", False),
        ("", "cpu:0", "cpu:1", False),
        ("", "cpu:1", "cpu:0", True),
        ("2", "cpu:0", "cpu:1", True),
    ]
    whole = on(chain, {"*": "cpu:2"})
    assert alike(chain, whole, torch.ones(2, 3)) == [], "batch and loss are there"


class Skips(nn.Module):
    """Skips over a block on another device, adds a parameter of its own, and passes keywords, lists and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(3, 5), Inner()
        self.offset = nn.Parameter(torch.rand(3))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        hidden = self.down(x)
        first = self.up(parts=[hidden, {"again": hidden}], table=self.table)
        second = self.up([first.new_zeros(2, 5), {"again": hidden}], table=self.table)
        x = x + self.offset
        x += second
        found: torch.Tensor = torch.cat([x + first, first * scale], 1)
        return found


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, parts: Any, table: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(parts[0]) * self.linear(parts[1]["again"]) + table
        return found


@pytest.mark.parametrize(
    "rules", [{"up": "cpu:1"}, {"down": "cpu:1"}, {"offset": "cpu:1"}, {"up": "cpu:1", "down": "cpu:2"}]
)
def test_code_between_the_modules_need_not_know(rules: dict[str, str]) -> None:
    made = on(Skips, rules)
    found = alike(Skips, made, torch.ones(2, 3), scale=torch.full((2, 1), 2.0))
    assert found
    if "up" in rules:
        # The same table goes there twice, the hidden values once for each call.
        calls = [one for one in found if one.module == "up" and not one.backward]
        assert sum(one.num_bytes == 12 for one in calls) == 1
        assert {one.target for one in calls} == {"cpu:1"}


def test_an_operation_runs_where_most_of_its_bytes_are() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gain = nn.Linear(3, 3), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.gain * self.linear(x)
            return found

    found = alike(Scaled, on(Scaled, {"linear": "cpu:1", "gain": "cpu:0"}), torch.ones(2, 3))
    assert [(one.num_bytes, one.source, one.backward) for one in found] == [(4, "cpu:0", False), (4, "cpu:1", True)]


class Split(nn.Module):
    """A block on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.other(self.one(x)) + x)


class Blocks(nn.Module):
    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Split() for _ in range(2))
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand else block(x)
        return x


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_blocks_on_two_devices_are_computed_again(recompute: str, by_hand: bool) -> None:
    def build() -> nn.Module:
        return Blocks(by_hand)

    made = on(build, {"blocks.*.other": "cpu:1"}, recompute=recompute)
    found = alike(build, made, torch.ones(2, 3, requires_grad=True))
    assert {one.module for one in found} >= {"blocks.0.other", "blocks.1.other"}


def test_the_names_and_the_signature_stay() -> None:
    made = on(Skips, {"up": "cpu:1"})
    assert list(made.map) == ["offset", "down.weight", "down.bias", "up.linear.weight", "up.linear.bias", "table"]
    assert list(inspect.signature(made.bare().forward).parameters) == ["x", "scale"]


def test_a_model_of_several_models_ends_at_home_each() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}

    made = on(build, {"a": "cpu:0", "b": "cpu:1"})
    assert made.placement is not None
    with made.placement.recorded() as found:
        made.modules["b"](made.modules["a"](torch.ones(1, 2)))
    assert ways(found) == [("a", "cpu:1", "cpu:0", False), ("a", "cpu:0", "cpu:1", False)]
    assert {str(place): size for place, size in made.placement.num_bytes.items()} == {"cpu:0": 24, "cpu:1": 24}


def test_clipping_sums_over_the_devices() -> None:
    made, alone = on(chain, {"[01]": "cpu:0", "[23]": "cpu:1"}), spread(chain)
    for one in (made, alone):
        one.modules[""](torch.ones(2, 3)).square().sum().backward()
    scale = torch.tensor(0.5)
    norms = [one.clip(list(one.trainable().values()), 0.1, scale) for one in (made, alone)]
    assert torch.allclose(norms[0], norms[1], rtol=1e-6)
    for name, parameter in made.trainable().items():
        other = alone.trainable()[name].grad
        assert parameter.grad is not None and other is not None and torch.allclose(parameter.grad, other, rtol=1e-5)


def test_foreach_kernels_get_the_tensors_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = on(chain, {"[01]": "cpu:0", "[23]": "cpu:1"})
    run(made, torch.ones(2, 3))
    seen: list[int] = []
    norm: Any = torch._foreach_norm

    def count(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(gradients))
        return norm(gradients, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_norm", count)
    made.clip(list(made.trainable().values()), 1.0, None)
    assert seen == [4, 4]


def test_only_code_between_devices_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, depths = [], []
    look = placement._Aligned.__torch_function__

    def count(self: Any, func: Any, *args: Any) -> Any:
        looked.append(func)
        depths.append(len(_get_current_function_mode_stack()))
        return look(self, func, *args)

    monkeypatch.setattr(placement._Aligned, "__torch_function__", count)
    run(on(chain, {"[01]": "cpu:0", "[23]": "cpu:1"}), torch.ones(2, 3))
    assert looked == [], "each linear layer lies on one device"
    run(on(Blocks, {"blocks.*.other": "cpu:1"}), torch.ones(2, 3))
    assert len(looked) == 6, "two sums and a tanh in each of two blocks"
    assert set(depths) == {0}, "and once, though the model and its block are both on several"


@pytest.mark.gpu
def test_on_host_and_gpu() -> None:
    for rules in ({"up": "cuda:0", "down": "cpu"}, {"up": "cpu", "down": "cuda"}, {"offset": "cpu"}):
        layout = Layout(kind="placement", placement=tuple(rules.items()))
        share = share_of(layout, (torch.device("cuda:0"),))
        made = spread(Skips, layout, mesh=Mesh(layout, 0, None, share=share), device=share.home.device)
        x, scale = torch.ones(2, 3, device="cuda"), torch.full((2, 1), 2.0, device="cuda")
        output, found = run(made, x, scale=scale)
        assert output.device.type == "cuda" and found
        assert made.local("up.linear.weight").device.type == ("cpu" if rules.get("up") == "cpu" else "cuda")
        alone = spread(Skips).modules[""]
        expected = alone(x.cpu(), scale=scale.cpu())
        expected.square().sum().backward()
        assert torch.allclose(output.cpu(), expected, rtol=1e-4)
        optimizer = torch.optim.AdamW(made.trainable().values(), fused=True)
        norm = made.clip(list(made.trainable().values()), 1.0, torch.ones((), device="cuda"))
        squares = [p.grad.square().sum() for p in alone.parameters() if p.grad is not None]
        assert float(norm) == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-4)
        optimizer.step()
