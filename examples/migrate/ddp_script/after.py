"""Which side of a curved surface a point lies on: torchrun --nproc-per-node 2 train.py"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


def make_samples(num_samples: int, seed: int) -> TensorDataset:
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())


def main() -> None:
    with allranks.join(layout="ddp", seed=0) as world:
        model = world.parallelize(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=192)

        dataset = make_samples(2048, seed=1)
        stream = world.stream(dataset, global_batch=32, epochs=3, shuffle=True)  # over all processes
        world.resume(model, optimizer, stream, scheduler=scheduler)
        for points, sides in stream:
            loss = nn.functional.cross_entropy(model(points), sides, reduction="sum")
            world.backward(loss, targets=len(sides))
            if world.step(optimizer, max_norm=1.0):
                scheduler.step()
            world.save(every=64)

        def measure(batch):
            points, sides = batch
            return {"accuracy": ((model(points).argmax(dim=1) == sides).sum(), len(sides))}

        found = world.evaluate(make_samples(1000, seed=2), measure, batch=200)
        if world.rank == 0:
            print(f"accuracy {found['accuracy']:.4f}")


if __name__ == "__main__":
    main()
