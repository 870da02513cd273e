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


MATRIX, VECTOR = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, dtype=torch.bfloat16)
ROW = torch.ones(1, WIDTH)
PLACES = torch.zeros(WIDTH, dtype=torch.int64)
CAST: dict[str, tuple[Callable[[], torch.Tensor], torch.dtype]] = {
    "mv": (lambda: torch.mv(MATRIX, VECTOR), torch.bfloat16),
    "addmv": (lambda: torch.addmv(VECTOR, MATRIX, VECTOR), torch.bfloat16),
    "addr": (lambda: torch.addr(MATRIX, VECTOR, VECTOR.float()), torch.bfloat16),
    "convolution": (
        lambda: torch.convolution(ROW[None], VECTOR[None, None], None, (1,), (0,), (1,), False, (0,), 1),
        torch.bfloat16,
    ),
    "lstm_cell": (
        lambda: torch.lstm_cell(ROW, (ROW, ROW.bfloat16()), MATRIX.repeat(4, 1), MATRIX.repeat(4, 1))[0],
        torch.bfloat16,
    ),
    "layer_norm": (lambda: functional.layer_norm(MATRIX, (WIDTH,), VECTOR, VECTOR), torch.float32),
    "group_norm": (lambda: functional.group_norm(MATRIX, 2, VECTOR, VECTOR), torch.float32),
    "dot": (lambda: torch.dot(VECTOR.float(), VECTOR), torch.float32),
    "bilinear": (lambda: functional.bilinear(MATRIX, MATRIX.bfloat16(), MATRIX[None]), torch.float32),
    "index_put": (lambda: VECTOR.index_put((PLACES,), VECTOR.float()), torch.float32),
    "atan2": (lambda: torch.atan2(VECTOR, VECTOR), torch.bfloat16),
}


@pytest.mark.parametrize("name", CAST)
def test_what_a_gpus_autocast_brings_to_one_type(name: str) -> None:
    """By its lists."""
    call, expected = CAST[name]
    with as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        assert call().dtype is expected


def test_a_gpus_autocast_leaves_float64() -> None:
    with as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        assert torch.mv(MATRIX.double(), VECTOR.double()).dtype is torch.float64
        with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type"):  # torch 2.13, 2.11
            torch.mv(MATRIX.double(), VECTOR)


def test_gradients_have_the_types_of_what_was_given() -> None:
    matrix = MATRIX.clone().requires_grad_()
    with as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        torch.mv(matrix, VECTOR).float().sum().backward()
    assert matrix.grad is not None and matrix.grad.dtype is torch.float32
    assert torch.equal(matrix.grad, torch.ones(WIDTH, WIDTH))


def test_afterwards_the_processor_is_itself_again() -> None:
    make, expected = CASES["dropout"]
    before = kept(make, gpu=False)
    assert kept(make, gpu=True) == expected != before
    assert kept(make, gpu=False) == before
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype is torch.bfloat16
