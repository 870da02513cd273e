"""float8 for a GPU: the same products as in bfloat16, and no copies of weights; a processor's emulation holds more."""

import pytest
import torch

from allranks.parallel import float8
from allranks.rehearsing.eight_bits import multiplying_in_eight_bits
from tests.rehearsing.tasks import Tokens, rehearsed

SIZES = {"hidden": 128, "seq": 128, "vocab": 512, "layers": 2}


@pytest.mark.full
def test_a_gpu_multiplies_in_eight_bits() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: allranks[float8]")
    task = Tokens(**SIZES)
    low, high = (rehearsed(task, "single", 1, f"train.precision={p}", on_cuda=True) for p in ("float8", "bfloat16"))
    emulated = rehearsed(task, "single", 1, "train.precision=float8")
    assert low.flops == high.flops == emulated.flops
    # In bfloat16 autocast keeps a copy of two bytes of each weight of the blocks; torchao takes the weights themselves.
    weights = sum(weight.numel() for weight in task.model().get_submodule("layers").parameters() if weight.dim() > 1)
    assert low.at == high.at
    assert high.by_category["activations"] - low.by_category["activations"] == 2 * weights
    assert low.resting_bytes == high.resting_bytes


def test_inside_cudas_autocast_is_the_processors() -> None:
    assert float8.emulates(torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled()
        with multiplying_in_eight_bits():
            assert not float8.emulates(torch.device("cpu"))
            assert torch.is_autocast_enabled() and torch.get_autocast_gpu_dtype() is torch.bfloat16
    assert float8.emulates(torch.device("cpu"))
