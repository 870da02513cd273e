"""A right Task, and mistakes in allranks itself, one at a time: of laws and of axes that mutants.py has none for."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.utils.data import TensorDataset

import allranks
from allranks.checkpointing import portion
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.parallel import parallelize, tensor
from allranks.parallel.expert import ExpertGradients
from allranks.parallel.gloo_ops import Exchange
from allranks.parallel.initial import Placer
from allranks.parallel.stages import Stages
from allranks.stepping import passes, session
from allranks.stepping.agreement import Agreement

WRAPPED = list[tuple[Any, str, Any]]()
"""What mistakes have taken the place of."""
MADE = {""}
"""Mistakes that this process makes already: once, however often it reads its data."""


class Net(nn.Module):
    """The next word from one alone: a table, a layer, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.norm(torch.tanh(self.inner(self.table(x)))))
        return logits


class Laws(allranks.Task):
    """The next word of six, with the mistake `mutant`."""

    mutant: str = ""
    blocks: str = ""
    defaults = {"train.global_batch": 16, "optimizer.name": "adamw", "train.max_norm": 0.05}

    def dataset(self, split: str) -> TensorDataset:
        """53 sentences to train on, 27 to validate; some words have no target."""
        if self.mutant not in MADE and split == "train" and dist.is_initialized():
            MADE.add(self.mutant)
            MISTAKES[self.mutant]()
        number = 53 if split == "train" else 27
        x = (torch.arange(number)[:, None] * 7 + torch.arange(6) ** 2) % 11
        y = (x * 3 + 1) % 11
        y[::4, 2:] = -100
        return TensorDataset(x, y)

    def model(self) -> nn.Module:
        """A transformer or one with experts, where `blocks` says so."""
        if self.blocks == "experts":
            return MoETransformer(11, 2, 16, 2, num_experts=4, top_k=2, ffn=8, max_seq=6)
        return Transformer(11, 4, 16, 2, max_seq=6) if self.blocks else Net()

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed over the words that have a target."""
        return nn.functional.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum")


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    WRAPPED.append((owner, name, getattr(owner, name)))
    setattr(owner, name, make(getattr(owner, name)))


def redrawn_shard() -> None:
    def make(real: Any) -> Any:
        def stream_one(self: Any, built: torch.Tensor) -> torch.Tensor:
            placed: torch.Tensor = real(self, built)
            if dist.get_rank() == 1 and placed.shape == (6, 6):
                placed.data.normal_()
            return placed

        return stream_one

    wrap(Placer, "_stream", make)


def reduce_low(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook for DDP: the mean in bfloat16."""
    low = bucket.buffer().bfloat16() / dist.get_world_size()
    dist.all_reduce(low)
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer().copy_(low))
    return done


def low_reduction() -> None:
    def make(real: Any) -> Any:
        def replicate(*args: Any, **options: Any) -> Any:
            replicas = real(*args, **options)
            replicas.register_comm_hook(None, reduce_low)
            return replicas

        return replicate

    wrap(parallelize, "replicate", make)


def saved_changed() -> None:
    def make(real: Any) -> Any:
        def write(temporary: Any, held: Any, *rest: Any) -> Any:
            mine = [(e, t * 1.001 if e.name == "model.inner.weight" else t) for e, t in held.mine]
            return real(temporary, replace(held, mine=mine), *rest)

        return write

    wrap(portion, "_write", make)


def counted_filler() -> None:
    def make(real: Any) -> Any:
        return lambda self, micro_step, scale: real(self, replace(micro_step, weight=1), scale)

    wrap(passes.PlainPasses, "_backward", make)


def counts_alone() -> None:
    def make(real: Any) -> Any:
        return lambda self, group, device, **options: real(self, None, device, **options)

    wrap(Agreement, "__init__", make)


def part_of_norms() -> None:
    wrap(tensor, "_gradients_summed", lambda real: lambda module, group: nullcontext())


def sum_for_mean() -> None:
    def make(real: Any) -> Any:
        def begin(self: Any, part: Any, whole: Any, group: Any, divisor: int, *more: Any, **options: Any) -> None:
            real(self, part, whole, group, 1, *more, **options)

        return begin

    wrap(Exchange, "__init__", make)


def tied_apart() -> None:
    wrap(Stages, "reduce_shared", lambda real: lambda self: None)


def experts_by_ep() -> None:
    def make(real: Any) -> Any:
        def reduce(self: Any, among: Any = None) -> None:
            real(self, among)
            for key, parameter in self.parameters.items():
                if among is None or key in among:
                    parameter.grad /= self._mesh.layout.ep

        return reduce

    wrap(ExpertGradients, "reduce", make)


def after_start(mistake: Callable[[], None]) -> Callable[[], None]:
    """The mistake from the first step on: the comparison before it, which would refuse the run, does not meet it."""

    def make(real: Any) -> Any:
        first = len(WRAPPED)

        def meet(*args: Any) -> Any:
            while len(WRAPPED) > first:  # of the start before this one, where a run is resumed
                setattr(*WRAPPED.pop())
            found = real(*args)
            mistake()
            return found

        return meet

    return lambda: wrap(session, "_meet", make)


MISTAKES: dict[str, Callable[[], None]] = {
    "initial values of a shard redrawn": redrawn_shard,
    "reduced in bfloat16": low_reduction,
    "saved tensor changed": saved_changed,
    "filler counts": counted_filler,
    "targets counted alone": counts_alone,
    "norms of a part": part_of_norms,
    "norms of a part, in steps": after_start(part_of_norms),
    "sum for mean": sum_for_mean,
    "tied apart": tied_apart,
    "tied apart, in steps": after_start(tied_apart),
    "experts by ep": experts_by_ep,
    "experts by ep, in steps": after_start(experts_by_ep),
}
