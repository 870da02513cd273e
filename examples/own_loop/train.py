"""A loop of one's own, on any number of processes.

python examples/own_loop/train.py
torchrun --nproc-per-node 2 examples/own_loop/train.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


def make_samples(num_samples: int, seed: int) -> TensorDataset:
    """Points in four dimensions, and on which side of a curved surface they lie."""
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())


def main() -> None:
    with allranks.join(layout="ddp", seed=0) as world:
        model = world.parallelize(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=1e-2)
        stream = world.stream(make_samples(8192, seed=1), global_batch=64, seed=0)
        world.resume(model, optimizer, stream)
        for points, sides in stream:
            loss = nn.functional.cross_entropy(model(points), sides, reduction="sum")
            world.backward(loss, targets=len(sides))  # synchronises on the step's last micro-batch
            world.step(optimizer, max_norm=1.0)  # agrees the count, divides, clips, steps
            world.save(every=50)
            world.log(loss=loss)

        def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
            points, sides = batch
            return {"accuracy": ((model(points).argmax(dim=1) == sides).sum(), len(sides))}

        found = world.evaluate(make_samples(1000, seed=2), measure, batch=200)
        if world.rank == 0:
            print(f"accuracy {found['accuracy']:.3f} on 1000 new points, {world.size} process(es)")


if __name__ == "__main__":
    main()
