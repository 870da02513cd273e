"""Which side of a curved surface a point lies on: python train.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_samples(num_samples: int, seed: int) -> TensorDataset:
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    loader = DataLoader(make_samples(2048, seed=1), batch_size=32, shuffle=True)  # over all GPUs
    for _ in range(3):
        for points, sides in loader:
            points, sides = points.to(device), sides.to(device)
            loss = nn.functional.cross_entropy(model(points), sides)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    held_out = DataLoader(make_samples(1000, seed=2), batch_size=200)
    model.eval()
    with torch.no_grad():
        correct = sum((model(points.to(device)).argmax(dim=1).cpu() == sides).sum() for points, sides in held_out)
    print(f"accuracy {correct / 1000:.4f}")
    torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
