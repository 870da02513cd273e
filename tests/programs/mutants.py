"""A right Task, and mistakes in allranks itself, one at a time: made only where several processes run."""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.data import stream
from allranks.parallel import norm
from allranks.parallel.spread import Spread
from allranks.stepping import evaluate, passes
from allranks.stepping.schedule import Schedule
from allranks.training.snapshot import Contents


class Net(nn.Module):
    """Words of 11 through one table that also tells the next word, with a statistic of the batch if wanted."""

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.norm: nn.Module = nn.BatchNorm1d(6) if statistics else nn.LayerNorm(6)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(self.norm(torch.tanh(self.inner(self.table(x)))))
        found: torch.Tensor = self.out(hidden)
        return found


class Mutants(allranks.Task):
    """The next word, with the mistake `mutant`."""

    mutant: str = ""
    statistics: bool = False
    defaults = {"train.global_batch": 16, "optimizer.name": "adamw", "train.max_norm": 0.05}

    def dataset(self, split: str) -> TensorDataset:
        """103 words to train on, 27 to validate; some have no target."""
        if self.mutant and split == "train" and dist.is_initialized():
            MISTAKES[self.mutant]()
        number = 103 if split == "train" else 27
        x = torch.arange(number) * 7 % 11
        y = (x * 3 + 1) % 11
        y[::4] = -100
        return TensorDataset(x, y)

    def model(self) -> nn.Module:
        """One table, tied."""
        return Net(self.statistics)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed over the words that have a target."""
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def missing_divide() -> None:
    wrap(passes.PlainPasses, "_backward", lambda real: lambda self, step, scale: real(self, step, scale * 2))


def wrong_norm() -> None:
    wrap(norm, "_total_norm", lambda real: lambda *args: real(*args) * math.sqrt(2))


def tied_twice() -> None:
    def make(real: Any) -> Any:
        def grouped(parameters: Any, *more: Any) -> Any:
            tied = [parameter for parameter in parameters if parameter.shape[0] == 11]
            return real([*parameters, *tied], *more)

        return grouped

    wrap(norm, "_group_by_placing", make)


def equal_data() -> None:
    def make(real: Any) -> Any:
        def init(self: Any, dataset: Any, **options: Any) -> None:
            real(self, dataset, **options | {"dp_rank": 0})

        return init

    wrap(stream.DataStream, "__init__", make)


def equal_dropout() -> None:
    wrap(stream, "random_key", lambda real: lambda seed, step, micro, dp_rank, *more: real(seed, step, micro, 0, *more))
    wrap(stream, "random_keys", lambda real: lambda seed, first, shape, dp_rank: real(seed, first, shape, 0))


def resume_position() -> None:
    def make(real: Any) -> Any:
        def load(self: Any, state: Any) -> None:
            real(self, state)
            self.position += self.cut.global_batch

        return load

    wrap(stream.DataStream, "load_state_dict", make)


def after_load(change: Callable[[Contents], None]) -> Callable[[], None]:
    def make(real: Any) -> Any:
        def load(self: Contents, checkpoint: Any) -> Any:
            decisions = real(self, checkpoint)
            change(self)
            return decisions

        return load

    return lambda: wrap(Contents, "load", make)


def zero_state(contents: Contents) -> None:
    for _, tensor in contents.optimizers.parts():
        tensor.zero_()


def forget_buffers(contents: Contents) -> None:
    for name, entry in contents.spread.map.items():
        if entry.kind == "buffer":
            contents.spread.local(name).zero_()


def mean_of_means() -> None:
    def make(real: Any) -> Any:
        def means(sums: Any, group: Any, device: Any) -> Any:
            return real({name: (total / max(1, count), 1) for name, (total, count) in sums.items()}, group, device)

        return means

    wrap(evaluate, "world_means", make)


def no_synchronisation() -> None:
    wrap(Spread, "synchronise", lambda real: lambda self, last: real(self, False))


def rate_by_ranks() -> None:
    size = int(os.environ["WORLD_SIZE"])
    wrap(Schedule, "factor", lambda real: lambda self, samples, more: real(self, samples, more) * size)


def empty_ledger() -> None:
    wrap(passes, "ledger_of", lambda real: lambda batch: real(batch) + 1)


def off_by(factor: float) -> Callable[[], None]:
    def make(real: Any) -> Any:
        def run(self: Any, batch: Any, scale: Any) -> Iterator[Any]:
            for sums in real(self, batch, scale):
                gradient = self._spread.trainable()["inner.weight"].grad
                gradient.mul_(factor)
                yield sums

        return run

    return lambda: wrap(passes.PlainPasses, "run", make)


MISTAKES: dict[str, Callable[[], None]] = {
    "missing divide": missing_divide,
    "wrong norm": wrong_norm,
    "tied twice in the norm": tied_twice,
    "ranks with equal data": equal_data,
    "dropout seeds equal": equal_dropout,
    "resume at another position": resume_position,
    "optimizer state not restored": after_load(zero_state),
    "buffers not restored": after_load(forget_buffers),
    "average of averages": mean_of_means,
    "no synchronisation": no_synchronisation,
    "rate times ranks": rate_by_ranks,
    "wrong ledger": empty_ledger,
    "a billionth": off_by(1 + 1e-9),
    "two percent": off_by(1.02),
}
