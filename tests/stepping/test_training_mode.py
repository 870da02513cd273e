"""A forward as in training that leaves nothing behind, and in which torch's own kinds do nothing of their own."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.stepping.kept_state import state_kept
from allranks.stepping.training_mode import as_in_training


class Writing(nn.Module):
    """Writes into a buffer, puts another in its place, sets attributes, and shares a list with its part."""

    counted: torch.Tensor
    replaced: torch.Tensor
    layers: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.register_buffer("counted", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.layers.register_buffer("shared", self.counted)
        self.calls, self.names = 0, ["made"]
        self.layers.names = self.names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted += 1
        self.replaced = self.get_parameter("layers.0.weight").sum(0)
        self.calls += 1
        self.last = x
        self.names.append("called")
        assert self.layers.names is self.names
        assert self.layers.shared is self.counted
        found: torch.Tensor = self.layers(x)
        return found


@pytest.mark.parametrize("context", [state_kept, as_in_training])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(context: Any, fails: bool) -> None:
    module = Writing()
    module.layers[0].eval()
    buffers = dict(module.named_buffers(remove_duplicate=False))
    values = {name: value.clone() for name, value in buffers.items()}
    modes = [part.training for part in module.modules()]
    with pytest.raises(ValueError, match="fails") if fails else context(module):  # noqa: SIM117
        with context(module):
            module(torch.randn(4, 2))
            if fails:
                raise ValueError("fails")
    found = dict(module.named_buffers(remove_duplicate=False))
    assert all(found[name] is buffer for name, buffer in buffers.items())
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert [part.training for part in module.modules()] == modes
    assert (module.calls, module.names, hasattr(module, "last")) == (0, ["made"], False)
    assert module.layers.names is module.names


def test_torchs_own_kinds_do_nothing_and_others_train() -> None:
    module: Any = nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(2),
            "bare": nn.BatchNorm1d(2, track_running_stats=False),
            "drop": nn.Dropout(0.5),
            "attention": nn.MultiheadAttention(2, 1, dropout=0.5),
            "linear": nn.Linear(2, 2),
            "frozen": nn.Linear(2, 2).eval(),
        }
    )
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    with as_in_training(module):
        trains = {name: part.training for name, part in module.items()}
        assert trains == {
            "norm": False,
            "bare": False,
            "drop": False,
            "attention": False,
            "linear": True,
            "frozen": False,
        }
        for name in ("norm", "bare"):
            assert torch.allclose(module[name](x)[:1], module[name](x[:1]))
    assert module["bare"].running_mean is None
    assert all(module[name].training for name in ("norm", "bare", "drop", "attention"))
