"""A small GPT-2 on the bytes of a text: allranks train train.py --nproc 2"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import allranks


class Windows(Dataset):
    def __init__(self, path: str, seq: int) -> None:
        text = torch.tensor(list(Path(path).read_bytes()))
        self.rows = text[: len(text) // seq * seq].view(-1, seq)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Notes(allranks.Task):
    defaults = {
        "train.steps": 20,
        "train.global_batch": 16,  # over all processes and both micro-batches of a step
        "train.micro_batch": 4,
        "train.max_norm": 1.0,
        "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.0,
        "schedule.name": "linear",
    }

    def dataset(self, split):
        return Windows("notes.txt", seq=64) if split == "train" else None

    def model(self):
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
        return GPT2LMHeadModel(config)

    def inputs(self, batch):
        return {"input_ids": batch["input_ids"], "use_cache": False}

    def loss(self, output, batch):  # the SUM over the bytes: each position's next one
        guesses, following = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(guesses, following, reduction="sum")

    def targets(self, batch):
        return batch["labels"][:, 1:].numel()
