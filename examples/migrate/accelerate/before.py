"""Which side of a curved surface a point lies on: accelerate launch --num_processes 2 train.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_samples(num_samples: int, seed: int) -> TensorDataset:
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Over 96 steps: accelerate moves it once for each process.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=96 * accelerator.num_processes)
    loader = DataLoader(make_samples(2048, seed=1), batch_size=16, shuffle=True)  # in each process
    held_out = DataLoader(make_samples(1000, seed=2), batch_size=100)
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(model, optimizer, scheduler, loader, held_out)

    for _ in range(3):
        for points, sides in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), sides)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    correct = 0
    with torch.no_grad():
        for points, sides in held_out:
            guessed, sides = accelerator.gather_for_metrics((model(points).argmax(dim=1), sides))
            correct += (guessed == sides).sum().item()
    accelerator.print(f"accuracy {correct / 1000:.4f}")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")


if __name__ == "__main__":
    main()
