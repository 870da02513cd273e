"""Which side of a curved surface a point lies on: python train.py"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_samples(num_samples: int, seed: int) -> TensorDataset:
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())


class Sides(lightning.LightningModule):
    def __init__(self, width: int = 32):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch, index):
        points, sides = batch
        loss = nn.functional.cross_entropy(self.model(points), sides)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        points, sides = batch
        accuracy = (self.model(points).argmax(dim=1) == sides).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=96)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=3, devices=2, strategy="ddp", gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False
    )
    loader = DataLoader(make_samples(2048, seed=1), batch_size=16, shuffle=True)  # in each process
    held_out = DataLoader(make_samples(1000, seed=2), batch_size=100)
    sides = Sides()
    trainer.fit(sides, loader, held_out)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
        torch.save(sides.model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
