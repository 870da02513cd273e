"""A small GPT-2 on the bytes of a text: torchrun --nproc-per-node 2 train.py"""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Windows(Dataset):
    def __init__(self, path: str, seq: int) -> None:
        text = torch.tensor(list(Path(path).read_bytes()))
        self.rows = text[: len(text) // seq * seq].view(-1, seq)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=20,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Windows("notes.txt", seq=64))
    trainer.train()
    trainer.save_model("trained")


if __name__ == "__main__":
    main()
