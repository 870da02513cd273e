"""The demo's numbers are what they say: bits per byte of the held-out bytes, and the compressors' on the same."""

import lzma
import math
import re
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from allranks.data.sources import ByteWindows
from allranks.errors import DataError
from allranks.stepping.loss_check import NUM_SAMPLES, examine_loss
from allranks.task import load_task, resolve_inputs, resolve_targets
from allranks.training.demo import Text, bits_per_byte, predicted_bytes, printable

TINY = {"seq": 16, "num_layers": 1, "hidden": 16, "num_heads": 2, "held_out": 0.2}


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_bytes(b"".join(b"line %d of a text\n" % number for number in range(200)))
    return str(tmp_path / "*.txt")


class Frequencies(nn.Module):
    """Predicts the same distribution everywhere: its code length is known in closed form."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert not self.training
        return self.logits.expand(*tokens.shape, -1)


def test_bits_per_byte_is_the_mean_code_length_of_the_predicted_bytes(text: str) -> None:
    windows = Text(text=text, **TINY).dataset("validation")
    data = predicted_bytes(windows)
    assert data == b"".join(bytes(windows[index]["y"].tolist()) for index in range(len(windows)))
    counts = torch.bincount(torch.tensor(list(data)), minlength=256).double()
    shares = counts / counts.sum()
    entropy = -float((shares * shares.clamp(min=1e-300).log2()).sum())
    model = Frequencies((shares + 1e-12).log().float())
    assert bits_per_byte(model, windows) == pytest.approx(entropy, rel=1e-5)
    assert bits_per_byte(Frequencies(torch.zeros(256)), windows) == pytest.approx(8.0)
    assert model.training


def test_the_metric_is_the_loss_in_bits(text: str) -> None:
    task = Text(text=text, **TINY)
    items = task.dataset("train").__getitems__([0, 3, 5])
    batch = task.collate(items)
    output = torch.randn(3, 16, 256)
    bits, count = task.metrics(output, batch)["bits_per_byte"]
    probabilities = output.softmax(-1).gather(2, batch["y"][..., None])
    assert float(bits) == pytest.approx(-float(probabilities.log2().sum()), rel=1e-5)
    assert count == 48
    assert float(task.loss(output, batch)) == pytest.approx(float(bits) * math.log(2))


def test_the_task_is_found_and_its_batches_are_understood(text: str) -> None:
    task = load_task(None, {"text": text, **TINY})
    dataset = task.dataset("train")
    samples = [dataset[index] for index in range(NUM_SAMPLES)]
    batch = task.collate(samples)
    model = task.model()
    assert isinstance(model, nn.Module)
    inputs, targets = resolve_inputs(task, model, batch), resolve_targets(task, batch)
    assert targets.call(batch) == NUM_SAMPLES * 16
    assert model(*inputs.call(batch)).shape == (NUM_SAMPLES, 16, 256)
    assert examine_loss(task, model, samples, inputs=inputs.call, targets=targets.call).kind == "sum"


def test_training_and_held_out_text_share_no_byte(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number}:{line}\n" for line in range(99)))
    task = Text(text=str(tmp_path / "*.txt"), **TINY)
    names = [set(re.findall(rb"(\d+):", task.dataset(split).text.tobytes())) for split in ("train", "validation")]
    assert names[0] and names[1]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 40


def test_the_summary_compares_on_the_same_bytes(text: str) -> None:
    task = Text(text=text, **TINY)
    torch.manual_seed(0)
    model = task.model()
    summary = task.summary(model)
    windows = ByteWindows(task._files(), split="validation", seq=16, held_out=0.2)
    data = predicted_bytes(windows)
    learned, with_zlib, with_lzma = (float(number) for number in re.findall(r"(\d\.\d{3})", summary.splitlines()[0]))
    assert learned == pytest.approx(bits_per_byte(model, windows), abs=1e-3)
    assert with_zlib == pytest.approx(8 * len(zlib.compress(data, 9)) / len(data), abs=1e-3)
    assert with_lzma == pytest.approx(8 * len(lzma.compress(data, preset=9)) / len(data), abs=1e-3)
    assert f"the same {len(data):,} bytes" in summary
    assert "| line 18" in summary or "| line 19" in summary
    assert printable(summary.encode()) == summary
    assert task.summary(model) == summary


@pytest.mark.parametrize("state_first", [True, False])
def test_a_run_goes_on_with_its_own_text_only(text: str, tmp_path: Path, state_first: bool) -> None:
    began = Text(text=text, **TINY)
    began.dataset("train")
    state = began.state_dict()

    def go_on() -> None:
        task = Text(text=text, **TINY)
        if state_first:
            task.load_state_dict(state)
        task.dataset("train")
        if not state_first:
            task.load_state_dict(state)

    go_on()
    (tmp_path / "a.txt").write_bytes(b"another text, as long as it has to be " * 20)
    with pytest.raises(DataError, match=r"data.text='.*' is not the text that this run began with"):
        go_on()
    predicting = Text(text=text, **TINY)
    predicting.load_state_dict(state)
    predicting.dataset("validation")  # whoever only predicts needs no training text


def test_what_is_printed_cannot_disturb_the_terminal() -> None:
    assert printable(b"plain\n\ttab \x1b[2J \xff caf\xc3\xa9 \r\x00") == "plain\n\\ttab \\x1b[2J \\xff café \\r\\x00"
