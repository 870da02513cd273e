"""Small Tasks, one for each thing that a training has to bear; named as "tests.training.tasks:Name"."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from allranks.task import Task

WIDTH = 6


def points(num_points: int, seed: int) -> TensorDataset:
    """Points in the plane, and on which side of a curve each lies."""
    x = torch.randn(num_points, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 1] > torch.sin(2 * x[:, 0])).long())


LOOKS = 4
"""Losses are counted from here on; those that the start looks at, to see what a loss is, it puts back."""


class Curve(Task):
    """Which side of a curve a point lies on, with dropout, so that randomness shows.

    After `signal_after` losses in training mode the process sends itself `signal_name`, as a user or a scheduler would.
    `pause`: seconds that a loss takes longer.
    """

    num_points: int = 47
    width: int = WIDTH
    signal_after: int = -1
    signal_name: str = "SIGINT"
    boom: str = ""
    pause: float = 0.0

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._losses = LOOKS
        self._signalled = bytearray(1)  # no part of the state that the start puts back

    def dataset(self, split: str) -> Any:
        return points(self.num_points if split == "train" else 13, seed=len(split))

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(self.width, 2))

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if output.requires_grad:
            time.sleep(self.pause)
            self._losses += 1
            if self._losses == self.signal_after > 0 and not self._signalled[0]:
                self._signalled[0] = 1
                os.kill(os.getpid(), signal.Signals[self.signal_name])
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output: Any, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        if self.boom == "metrics":
            raise ValueError("the user's own mistake in metrics")
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}


class Overflowing(Curve):
    """Its loss is infinite in training mode, from the `first`-th time to before the `last`-th."""

    first: int = 8
    last: int = 10

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(output, batch)
        return loss * float("inf") if output.requires_grad and self.first <= self._losses < self.last else loss


class Poisoned(Curve):
    """The samples from `bad` to before `healthy` have no number for their first coordinate."""

    bad: int = 17
    healthy: int = 18

    def dataset(self, split: str) -> Any:
        found = super().dataset(split)
        if split == "train":
            found.tensors[0][self.bad : self.healthy, 0] = float("nan")
        return found


class Spiking(Curve):
    """One of its training losses, the `from_loss`-th, is a thousand times what it should be."""

    from_loss: int = -1

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(output, batch)
        return loss * 1000.0 if output.requires_grad and self._losses == self.from_loss else loss


class Flipping(Curve):
    """On rank 2 a bit of one weight flips in the `flip_at`-th training forward: memory that is at fault."""

    flip_at: int = -1

    def model(self) -> Any:
        self._made = super().model()
        return self._made

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(output, batch)
        if output.requires_grad and self._losses == self.flip_at and torch.distributed.get_rank() == 2:
            self._made[0].weight.data.view(torch.int32)[0, 0] ^= 1 << 20
        return loss


class Scheduling(Curve):
    """Has a scheduler of its own, and steps it in every micro-batch."""

    def optimizer(self, parameters: Any) -> Any:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(output, batch)
        if output.requires_grad and self._scheduler.optimizer.state:
            self._scheduler.step()
        return loss


class Replacing(Curve):
    """Makes its last layer anew before the `anew_at`-th training loss, as some do to forget."""

    anew_at: int = 12

    def model(self) -> Any:
        self._made = super().model()
        return self._made

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if output.requires_grad and self._losses + 1 == self.anew_at:
            self._made[3] = nn.Linear(self.width, 2)
        return super().loss(output, batch)


class Settling(Curve):
    """From its `later`-th training loss on rank 1 alone lowers the weight decay."""

    later: int = 14

    def optimizer(self, parameters: Any) -> Any:
        self._optimizer = torch.optim.AdamW(parameters, lr=0.01)
        return self._optimizer

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(output, batch)
        if output.requires_grad and self._losses >= self.later and torch.distributed.get_rank() == 1:
            self._optimizer.param_groups[0]["weight_decay"] *= 0.5
        return loss


class Tracker(nn.Module):
    """Subtracts the mean that it has learnt, which it begins to learn after a while: each rank of its own samples."""

    mean: torch.Tensor
    forwards: torch.Tensor

    def __init__(self, width: int, after: int) -> None:
        super().__init__()
        self.after = after
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            if int(self.forwards) > self.after:
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Tracking(Curve):
    """Has buffers that nobody broadcasts; in its first forwards there is nothing to see of it."""

    after: int = 4

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(2, self.width), Tracker(self.width, self.after), nn.Linear(self.width, 2))


class Remembering(Curve):
    """Counts its training losses, and remembers the count in the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._losses, "loaded": getattr(self, "loaded", None)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state["losses"]


class OwnOptimizer(Curve):
    """Makes its optimizer itself: two groups, one with momentum."""

    def optimizer(self, parameters: Any) -> Any:
        first, *rest = parameters
        groups = [{"params": [first], "momentum": 0.9}, {"params": rest, "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.1)


class SlowingSGD(torch.optim.Optimizer):
    """Its steps become smaller; how many it has made is a plain number in its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / state["count"])


class Slowing(Curve):
    """With an optimizer that torch does not know."""

    def optimizer(self, parameters: Any) -> Any:
        return SlowingSGD(parameters)


class Normed(Curve):
    """With batch statistics, and a buffer that counts every forward, in evaluation mode too."""

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(2, self.width), nn.BatchNorm1d(self.width), Counting(), nn.Linear(self.width, 2))


class Counting(nn.Module):
    """Counts its forwards."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Tied(Curve):
    """Two layers share a weight, and a rotation is a complex buffer that no checkpoint holds."""

    def model(self) -> Any:
        return TiedModel(self.width)


class TiedModel(nn.Module):
    """Two layers that share a weight."""

    rotation: torch.Tensor
    kept_rotation: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.middle = nn.Linear(width, width)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(width, 2)
        angles = torch.polar(torch.ones(width // 2), torch.arange(width // 2).float())
        self.register_buffer("rotation", angles, persistent=False)
        self.register_buffer("kept_rotation", angles.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.middle(self.first(x)))))
        pairs = torch.view_as_complex(hidden.float().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * self.rotation * self.kept_rotation).flatten(-2).to(hidden.dtype)
        found: torch.Tensor = self.last(turned)
        return found


class Noisy(Curve):
    """Prints to standard output, from Python and from below it."""

    def model(self) -> Any:
        print("the model is made")
        os.write(1, b"written below Python\n")
        return super().model()


class Gan(Task):
    """Two models that take turns, with an optimizer each; the critic sees fewer targets than the maker."""

    def dataset(self, split: str) -> Any:
        return points(23, seed=5)

    def model(self) -> Any:
        return {"maker": nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2)), "critic": nn.Linear(2, 1)}

    def optimizer(self, parameters: Any) -> Any:
        return {
            "maker": torch.optim.AdamW(parameters["maker"], lr=0.01),
            "critic": torch.optim.SGD(parameters["critic"], lr=0.05, momentum=0.9),
        }

    def step(self, models: Any, batch: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
        real = batch[0]
        fake = models["maker"](torch.randn(len(real), 3, dtype=real.dtype))
        scores = models["critic"](torch.cat([real, fake.detach()]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(scores.dtype)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
        yield "critic", loss, 2 * len(real)
        yield "maker", nn.functional.softplus(-models["critic"](fake)).sum(), len(real)


class Counted(IterableDataset[Any]):
    """The first `count` points, one after another; sharded: every `world`-th, beginning at `first`."""

    def __init__(self, order: str, count: int, first: int = 0, world: int = 1) -> None:
        self.order, self.count, self.first, self.world = order, count, first, world

    def __iter__(self) -> Iterator[Any]:
        source = points(self.count, seed=3)
        return (source[index] for index in range(self.first, self.count, self.world))


class Streamed(Curve):
    """Reads what can only be iterated over; where it is sharded, a rank's part is as long as its number is high."""

    order: Literal["global", "sharded"] = "global"
    defaults: ClassVar[Mapping[str, object]] = {"train.epochs": 1}

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        if self.order == "global":
            return Counted("global", self.num_points)
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return Counted("sharded", self.num_points - 19 * (world - 1 - rank), rank, world)


class WithText(Curve):
    """Has a setting for `data.text`."""

    text: str | None = None


class Broken(Curve):
    """Wrong in the way that `wrong` names."""

    wrong: str = ""

    def dataset(self, split: str) -> Any:
        sizes = {"empty": 0, "small": 3}
        if self.wrong == "empty iterable":
            return Counted("global", 0)
        if self.wrong == "undeclared":
            return Counted("some", 9)
        if self.wrong == "nothing":
            return None
        return points(sizes.get(self.wrong, self.num_points), seed=1)

    def loss(self, output: Any, batch: Any) -> Any:
        loss = super().loss(output, batch)
        if self.wrong == "raises":
            raise ZeroDivisionError("the user's own mistake")
        wrongs = {
            "mean": loss / len(batch[1]),
            "vector": loss.expand(3),
            "detached": loss.detach(),
            "number": loss.item(),
            "nan": loss * float("nan"),
        }
        return wrongs.get(self.wrong, loss)


class TwoWays(nn.Module):
    """Takes one of two blocks of the same size; which one depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = torch.distributed.get_rank() if self.training and torch.distributed.is_initialized() else 0
        found: torch.Tensor = self.last(self.blocks[rank % 2](self.first(x)))
        return found


class Forked(Curve):
    """Its ranks take different ways."""

    def model(self) -> Any:
        return TwoWays()


class Corrupting(Curve):
    """On rank `broken` a bit flips in the backward, from the `flips_from`-th training forward on or in that one alone:
    a device that is at fault.
    """

    broken: int = 0
    flips_from: int = 0
    flips_once: bool = False

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(output, batch)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        due = self._losses == self.flips_from if self.flips_once else self._losses >= self.flips_from > 0
        if output.requires_grad and rank == self.broken and due:
            output.register_hook(_flipped)
        return loss


def _flipped(gradient: torch.Tensor) -> torch.Tensor:
    flipped = gradient.clone()
    flipped.view(torch.int32)[0, 0] ^= 1 << 20
    return flipped


class FromFile(Curve):
    """Reads its points from a file, one row a sample; on rank 1 from `other`, where that is named."""

    file: str = ""
    other: str = ""

    def dataset(self, split: str) -> Any:
        second = self.other and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        x = torch.from_numpy(np.load(self.other if second else self.file))
        return TensorDataset(x, (x[:, 1] > 0).long()) if split == "train" else None


class WithExtraState(nn.Linear):
    """Keeps something beside its tensors, which no checkpoint has."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 3}


class Extra(Curve):
    """Its last layer has extra state."""

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), WithExtraState(self.width, 2))
