"""A user's Task file: the bytes of a small text through a mixture of experts."""

import time
from typing import Any

import torch
from torch import nn

import allranks
from allranks.models.moe import MoETransformer

SEQ = 16
TEXT = b"Many experts, and each word asks two of them. Nobody waits for a word that went elsewhere. " * 12


class Windows(torch.utils.data.Dataset[Any]):
    """Every `SEQ` bytes of the text, and the bytes that follow each."""

    draws = False

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.text) - 1) // SEQ

    def __getitem__(self, index: int) -> Any:
        window = self.text[index * SEQ : (index + 1) * SEQ + 1]
        return {"x": window[:-1], "y": window[1:]}


class Text(allranks.Task):
    """Learn which byte follows."""

    num_experts: int = 4
    pause: float = 0.0

    def dataset(self, split: str) -> Windows:
        """Nine tenths of the text to train on, the rest to validate."""
        cut = len(TEXT) * 9 // 10
        return Windows(TEXT[:cut] if split == "train" else TEXT[cut:])

    def model(self) -> nn.Module:
        """Two layers of experts."""
        return MoETransformer(256, 2, 16, 2, num_experts=self.num_experts, top_k=2, ffn=8, max_seq=SEQ)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed over the bytes; pauses where the settings say so."""
        time.sleep(self.pause)
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")
