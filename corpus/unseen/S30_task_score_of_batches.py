"""S30: metrics() weighs the F1 of each batch by its frames, which is not the F1 of all frames.

twin: task_speech.py
verify: --layout ddp --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu
from torch.nn.utils.rnn import pad_sequence

import allranks

BANDS = 5


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv1d(BANDS, width, 3, padding=1)
        self.second = nn.Conv1d(width, 1, 3, padding=1)

    def forward(self, frames, within):
        x = gelu(self.first(frames.transpose(1, 2))) * within[:, None]
        return self.second(x)[:, 0]


class Speech(allranks.Task):
    width: int = 10
    defaults = {"train.global_batch": 10, "optimizer.name": "adamw"}

    def dataset(self, split):
        generator = torch.Generator().manual_seed(len(split))
        utterances = []
        for number in range(34 if split == "train" else 15):
            frames = torch.randn(2 + number * 7 % 11, BANDS, generator=generator)
            utterances.append({"frames": frames, "spoken": frames[:, 0] + frames.cumsum(0)[:, 1] > number % 4 - 1})
        return utterances

    def collate(self, samples):
        frames = pad_sequence([sample["frames"] for sample in samples], batch_first=True)
        spoken = pad_sequence([sample["spoken"] for sample in samples], batch_first=True)
        lengths = torch.tensor([len(sample["frames"]) for sample in samples])
        return {"frames": frames, "spoken": spoken, "within": torch.arange(frames.shape[1]) < lengths[:, None]}

    def model(self):
        return Net(self.width)

    def targets(self, batch):
        return int(batch["within"].sum())

    def loss(self, output, batch):
        each = binary_cross_entropy_with_logits(output, batch["spoken"].to(output.dtype), reduction="none")
        return (each * batch["within"]).sum()

    def metrics(self, output, batch):
        told, true = (output > 0)[batch["within"]], batch["spoken"][batch["within"]]
        f1 = 2 * (told & true).sum() / (told.sum() + true.sum()).clamp(min=1)
        return {"f1": (f1 * len(true), len(true))}
