"""Counting the parameters of a model that is not there yet: no memory, no GPU, no compiler, next to no reading."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import nn

from allranks.errors import TaskError
from allranks.observing.memory import peak_rss_bytes
from allranks.training.counted_parameters import count_parameters, device_untouched
from allranks.training.demo import Text
from tests.programs.points import Points


def test_counting_writes_no_large_tensor() -> None:
    """250 M parameters in a gigabyte that nobody may touch, by every way in which torch's layers fill theirs."""

    class Wide(Points):
        def model(self) -> nn.Module:
            made = nn.Sequential(nn.Linear(5000, 10_000), nn.Embedding(10_000, 5000))
            for make in (torch.randn, torch.rand, torch.ones):
                made.register_parameter(make.__name__, nn.Parameter(make(10_000, 5000)))
            return made

    before = psutil.Process().memory_info().rss
    peak = peak_rss_bytes()
    assert count_parameters(Wide()) == 250_010_000
    assert psutil.Process().memory_info().rss - before < 50e6
    assert peak_rss_bytes() - max(peak, before) < 50e6


class Pretrained(Points):
    """Reads its weights from a file."""

    file: ClassVar[Path]

    def model(self) -> nn.Module:
        made = nn.Linear(5000, 5000)
        made.load_state_dict(torch.load(self.file))
        return made


@pytest.mark.parametrize("old", [False, True])
def test_of_pretrained_weights_a_file_is_mapped_and_next_to_nothing_read(tmp_path: Path, old: bool) -> None:
    """The workers read it after all; here 100 MB would be read for a number."""
    Pretrained.file = tmp_path / "weights.pt"
    torch.save(nn.Linear(5000, 5000).state_dict(), Pretrained.file, _use_new_zipfile_serialization=not old)
    peak, load = peak_rss_bytes(), torch.load
    before = max(peak, psutil.Process().memory_info().rss)
    assert count_parameters(Pretrained()) == 25_005_000
    assert torch.load is load
    if not old:  # a format that cannot be mapped is read, and counted
        assert peak_rss_bytes() - before < 50e6


def test_whoever_would_initialise_cuda_is_stopped() -> None:
    with patch.object(torch.cuda, "_lazy_init", side_effect=AssertionError) as init:
        for use in (lambda: torch.ones(1).cuda(), lambda: nn.Linear(2, 2).cuda(), torch.cuda.current_device):
            with device_untouched(), pytest.raises(TaskError, match="uses a GPU while it builds"):
                use()
        for make in (lambda: torch.ones(1, device="cuda"), lambda: nn.Linear(2, 2, device="cuda").to("cuda")):
            with device_untouched(), pytest.raises(TaskError, match="uses a GPU while it builds"):
                make()
        init.assert_not_called()
        assert torch.cuda._lazy_init is init


def test_counting_imports_no_compiler() -> None:
    """It would cost a second before the first step."""
    code = """
import sys
from allranks.training.counted_parameters import count_parameters
from allranks.training.demo import Text
print(count_parameters(Text()), "torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["434816", "False", "False"]
    assert count_parameters(Text()) == sum(parameter.numel() for parameter in Text().model().parameters())
