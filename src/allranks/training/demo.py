"""The built-in demo: a small language model over bytes, on the source text of the Python standard library or your own.

Every machine with Python has this text, so `allranks train` needs no download. How well the model learned is told in
bits per byte of text that it never saw, beside what two well-known compressors need for the very same bytes.
"""

import lzma
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from allranks.data.sources import ByteWindows, standard_library_text, text_files
from allranks.errors import DataError
from allranks.models.transformer import Transformer, generate
from allranks.task import Hints, Task

NUM_BYTES = 256
PROMPT_BYTES = 100
SAMPLE_BYTES = 200
SUMMARY_BATCH = 32


class Text(Task):
    """Predict the next byte of text.

    Settings:
        text: the files to learn from, a glob; `data.text` sets it. None: the standard library's source.
        seq: bytes in a window, and the most that the model sees at once.
        num_layers, hidden, num_heads: the size of the model.
        held_out: the part of the text that is never trained on.
    """

    text: str | None = None
    seq: int = 128
    num_layers: int = 2
    hidden: int = 128
    num_heads: int = 4
    held_out: float = 0.05

    # found by the tuning that docs/tutorial/first-run.md tells of: about 150 s on two processor cores
    defaults: ClassVar[Mapping[str, object]] = {
        "train.steps": 3600,
        "train.global_batch": 8,
        "train.max_norm": 1.0,
        "optimizer.name": "adamw",
        "optimizer.lr": 2e-3,
        "optimizer.beta2": 0.98,
        "optimizer.weight_decay": 0.1,
        "schedule.name": "linear",
        "schedule.warmup": 50,
    }

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._digests: dict[str, str] = {}  # of the training text: "now" and "at the start" of the run

    def model(self) -> nn.Module:
        """A decoder-only transformer over bytes."""
        return Transformer(NUM_BYTES, self.num_layers, self.hidden, self.num_heads, max_seq=self.seq)

    def dataset(self, split: str) -> ByteWindows:
        """Windows {"x": [seq], "y": [seq]} of the text; validation is text that training never sees."""
        windows = self._windows("validation" if split == "validation" else "train")
        if split == "train":
            self._digests["now"] = windows.digest
            self._check_text()
        return windows

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Nats, summed over every byte predicted."""
        return functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")

    def metrics(self, output: torch.Tensor, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """Bits per byte."""
        return {"bits_per_byte": (self.loss(output, batch) / math.log(2), batch["y"].numel())}

    def hints(self) -> Hints:
        """The blocks are the layers."""
        return Hints(blocks=("layers.*",))

    def summary(self, model: nn.Module) -> str:
        """Held-out bits per byte beside zlib's and lzma's for the same bytes, and a sampled continuation."""
        held_out = self._windows("validation")
        learned = bits_per_byte(model, held_out)
        data = predicted_bytes(held_out)
        compressed = {"zlib -9": len(zlib.compress(data, 9)), "lzma -9": len(lzma.compress(data, preset=9))}
        others = ", ".join(f"{name} {8 * size / len(data):.3f}" for name, size in compressed.items())
        return (
            f"held-out text: {learned:.3f} bits per byte; {others}\n"
            f"  on the same {len(data):,} bytes, which no training window holds; {held_out.rule}\n"
            "  (the compressors see nothing else and adapt while they read; the model learned from the training text\n"
            f"  and sees at most the {self.seq} bytes before the one that it predicts)\n"
            f"{self._sample(model, held_out)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The digest of the training text."""
        return {"text": self._digests["now"]} if "now" in self._digests else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember the text that the run began with: another one is refused."""
        if "text" in state:
            self._digests["at the start"] = state["text"]
            self._check_text()

    def _windows(self, split: Literal["train", "validation"]) -> ByteWindows:
        return ByteWindows(self._files(), split=split, seq=self.seq, held_out=self.held_out)

    def _files(self) -> tuple[Path, ...]:
        return standard_library_text() if self.text is None else text_files(self.text)

    def _check_text(self) -> None:
        if len(set(self._digests.values())) > 1:
            what = "the standard library" if self.text is None else f"data.text={self.text!r}"
            raise DataError(f"{what} is not the text that this run began with: start a new run for it")

    def _sample(self, model: nn.Module, held_out: ByteWindows) -> str:
        data = held_out.text.tobytes()
        start = data.find(b"\n", len(data) // 2) + 1  # a line's beginning, somewhere in the middle
        prompt = data[start : start + PROMPT_BYTES]
        device = next(model.parameters()).device
        tokens = generate(
            model,
            torch.tensor(list(prompt), device=device),
            SAMPLE_BYTES,
            max_seq=self.seq,
            temperature=0.7,
            generator=torch.Generator(device).manual_seed(0),
        )
        continued = bytes(tokens[len(prompt) :].tolist())
        return f"held-out text:\n{_indented(prompt)}\ncontinued by the model:\n{_indented(continued)}"


def predicted_bytes(windows: ByteWindows) -> bytes:
    """The bytes that the targets of the windows are, in order: all but the first and a last partial window."""
    return windows.text[1 : 1 + len(windows) * windows.seq].tobytes()


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: ByteWindows) -> float:
    """The mean code length of every target byte of `windows` under the model, in evaluation mode."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    nats = 0.0
    for start in range(0, len(windows), SUMMARY_BATCH):
        items = windows.__getitems__(list(range(start, min(start + SUMMARY_BATCH, len(windows)))))
        tokens = torch.stack([item["x"] for item in items]).to(device)
        targets = torch.stack([item["y"] for item in items]).to(device)
        logits = model(tokens).float()
        nats += float(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    model.train(training)
    return nats / math.log(2) / (len(windows) * windows.seq)


def printable(data: bytes) -> str:
    """Bytes as text that cannot disturb a terminal: escapes stand for what is not printable."""
    text = data.decode("utf-8", errors="backslashreplace")
    shown = [c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text]
    return "".join(shown)


def _indented(data: bytes) -> str:
    return "\n".join(f"  | {line}" for line in printable(data).splitlines())
