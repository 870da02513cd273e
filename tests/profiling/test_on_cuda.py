"""What a GPU keeps, by hand: no GPU is needed, and none has been asked."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.profiling.fakes import fake_mode
from allranks.profiling.on_cuda import as_on_cuda
from allranks.profiling.recorder import Recorder

ROWS, WIDTH = 6, 8
CELLS = ROWS * WIDTH


def kept(make: Callable[[torch.Tensor, nn.Parameter], Any], *, gpu: bool, fake: bool = True) -> int:
    """Bytes kept of an operation on activations in bfloat16, under autocast."""
    with as_on_cuda() if gpu else nullcontext(), fake_mode() if fake else nullcontext():
        weight = nn.Parameter(torch.ones(WIDTH))
        x = (torch.ones(ROWS, WIDTH) * torch.ones(WIDTH, requires_grad=True)).bfloat16()
        recorder = Recorder({}, {"weight": weight})
        with recorder.recording() as recording:
            with torch.autocast("cpu", torch.bfloat16):
                found = make(x, weight)
            found.sum().backward()
    return recording.saved_bytes


CASES: dict[str, tuple[Callable[[torch.Tensor, nn.Parameter], Any], int]] = {
    # its input in float32, and mean and deviation of each row
    "layer norm": (lambda x, w: functional.layer_norm(x, (WIDTH,), w, w), 4 * CELLS + 8 * ROWS),
    "rms norm": (lambda x, w: functional.rms_norm(x, (WIDTH,), w), 4 * CELLS + 4 * ROWS),
    "softmax": (lambda x, w: x.softmax(-1), 4 * CELLS),
    "dropout": (lambda x, w: functional.dropout(x, 0.1), CELLS),
    "no dropout": (lambda x, w: functional.dropout(x, 0.1, training=False), 0),
    "gelu": (lambda x, w: functional.gelu(x), 2 * CELLS),
}


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_a_gpu_keeps(name: str, fake: bool) -> None:
    make, expected = CASES[name]
    assert kept(make, gpu=True, fake=fake) == expected


def test_attention_with_dropout_keeps_no_scores() -> None:
    def attend(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        heads = x.view(1, 1, ROWS, WIDTH)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)

    # query, key and value are one here; the output, and one number a row
    assert kept(attend, gpu=True) == 2 * CELLS * 2 + 4 * ROWS
    assert kept(attend, gpu=False) > 2 * CELLS * 2 + 2 * ROWS * ROWS


def test_afterwards_the_processor_is_itself_again() -> None:
    make, expected = CASES["dropout"]
    before = kept(make, gpu=False)
    assert kept(make, gpu=True) == expected != before
    assert kept(make, gpu=False) == before
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype is torch.bfloat16
