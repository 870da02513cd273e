"""The hand-written side on one process is a plain loop, and it learns."""

from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from allranks.benchmarking.raw import raw_steps, spread
from allranks.benchmarking.subject import make_model
from allranks.layout import Layout

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inductor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when its compiler is imported


def test_losses_of_the_plain_loop() -> None:
    losses = [told() for told in raw_steps(Layout(kind="single"), "tiny", 40, 0, CPU)]
    assert len(losses) == 40
    assert 5.4 < losses[0] < 5.7  # ln 256 = 5.55
    assert sum(losses[-5:]) < sum(losses[:5])


def test_recompute_wraps_every_block() -> None:
    model = spread(make_model("tiny"), Layout(kind="single", recompute="full"), None, CPU)
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 2
