"""Which side of a curved surface a point lies on: torchrun --nproc-per-node 2 train.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_samples(num_samples: int, seed: int) -> TensorDataset:
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=192)

    dataset = make_samples(2048, seed=1)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)  # in each process
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for points, sides in loader:
            points, sides = points.to(device), sides.to(device)
            loss = nn.functional.cross_entropy(model(points), sides)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    held_out = make_samples(1000, seed=2)
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for points, sides in DataLoader(held_out, batch_size=100, sampler=DistributedSampler(held_out, shuffle=False)):
            points, sides = points.to(device), sides.to(device)
            counts += torch.tensor([(model(points).argmax(dim=1) == sides).sum(), len(sides)], device=device)
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"accuracy {counts[0] / counts[1]:.4f}")
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
