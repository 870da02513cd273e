"""A model by name: the module is made from the table that its profile is made from."""

import pytest
import torch

from allranks.errors import ConfigError
from allranks.named_models import NAMED
from allranks.rehearsing.named import Named

REHEARSED = (
    "gpt2",
    "gpt2-xl",
    "gpt3-175b",
    "llama2-7b",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "100b",
    "mixtral-8x7b",
)


@pytest.mark.parametrize("name", NAMED)
def test_module_and_profile_have_the_same_parameters(name: str) -> None:
    task = Named(name=name)
    if name not in REHEARSED:
        with pytest.raises(ConfigError, match="can be planned and not rehearsed"):
            task.model()
        return
    with torch.device("meta"):
        model = Named(name=name, layers=2).model()
    assert sum(p.numel() for p in model.parameters()) == Named(name=name, layers=2).shape().profile().parameters


def test_settings_change_the_shape() -> None:
    task = Named(name="llama3-8b", seq=64, layers=3)
    sample = task.dataset("train")[5]
    assert sample["tokens"].shape == sample["y"].shape == (64,)
    assert task.shape().layers == 3
    assert task.dataset("validation") is None


def test_the_loss_may_come_in_chunks() -> None:
    whole, chunked = Named(name="llama3-8b", seq=8), Named(name="llama3-8b", seq=8, chunk=4)
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "y": torch.zeros(1, 8, dtype=torch.int64)}
    assert set(whole.inputs(batch)) == {"tokens"}
    assert set(chunked.inputs(batch)) == {"tokens", "targets"}
    assert whole.loss(torch.zeros(1, 8, 16), batch).item() == pytest.approx(8 * torch.log(torch.tensor(16.0)).item())
    assert chunked.loss(torch.ones(1, 8), batch).item() == 8
