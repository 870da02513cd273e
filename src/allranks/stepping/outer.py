"""Local SGD: copies of the model train by themselves, and every so many steps a second optimizer puts them together.

What the copies have gone since they last were one, on the average, is the gradient of the outer optimizer: SGD with
Nesterov momentum in DiLoCo (Douillard et al. 2023, arXiv 2311.08105); with a rate of 1 and no momentum it is the plain
mean of local SGD (Stich 2018, arXiv 1805.09767). Each copy keeps its own inner optimizer state throughout. What a
copy's samples leave in its buffers (the running statistics of BatchNorm, the bias by which a router balances its
experts) no optimizer steps: it becomes the plain mean.
"""

from collections.abc import Collection, Iterator
from dataclasses import astuple, replace
from typing import Any, final

import torch
import torch.distributed as dist

from allranks.errors import LayoutError
from allranks.parallel.spread import Spread
from allranks.parameter_map import Box, Entry, one_of_each
from allranks.stepping.alike import everyones
from allranks.stepping.same_code import digest_of
from allranks.units import format_bytes
from allranks.verdict import Decision

Parts = list[tuple[Entry, torch.Tensor]]

MESSAGE_BYTES = 25 * 1024 * 1024  # DDP's own size of a bucket
MOMENTUM, COPY = "optimizer.outer_momentum", "optimizer.copy"


@final
class OuterOptimizer:
    """The step that puts the copies together.

    Attributes:
        every: after how many steps they are put together.
        apart: whether they have trained by themselves since they last were one.
        sent_bytes: what this rank has given to reductions between the copies so far.
    """

    def __init__(self, spread: Spread) -> None:
        layout = spread.mesh.layout
        assert layout.local_sgd is not None
        self.every, self._rate, self._momentum = layout.local_sgd, layout.outer_lr, layout.outer_momentum
        self._nesterov = layout.outer_nesterov
        self._spread = spread
        self._group, self._number = spread.mesh.group("dp_replicate"), layout.dp_replicate
        self._index = spread.mesh.coordinate("dp_replicate")
        self._of_this_copy = frozenset(spread.mesh.peers(("dp_replicate",)))
        names = list(spread.trainable())
        self._anchors = {name: spread.local(name).clone() for name in [*names, *_learnt(spread)]}
        self._velocities = {name: torch.zeros_like(self._anchors[name]) for name in names}
        self.apart = False
        self.sent_bytes = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Where no step was made yet that they have not seen: all copies are alike, and agree on what they are."""
        if not self.apart:
            for name, anchor in self._anchors.items():
                anchor.copy_(self._spread.local(name))

    def finish_step(self, step: int, *, last: bool) -> int:
        """After the update that makes `step` steps: put the copies together where that is due; collective then.

        Args:
            last: whether the training ends here, so that this round is a short one.

        Returns:
            How many steps the copies had gone, where they are one now; else 0.
        """
        self.apart = True
        if not last and step % self.every:
            return 0
        self.synchronise()
        return step % self.every or self.every

    @torch.no_grad()
    def synchronise(self) -> None:
        """One outer step from where the copies last were one; collective."""
        for names in self._messages():
            live = [self._spread.local(name) for name in names]
            flat = torch.cat([value.reshape(-1) for value in live])
            if flat.dtype in (torch.int16, torch.uint16):  # which neither NCCL nor gloo reduces
                flat = flat.int()
            # A count of batches is the largest: a copy whose place was only filled has counted less.
            how = dist.ReduceOp.SUM if flat.is_floating_point() else dist.ReduceOp.MAX
            dist.all_reduce(flat, how, group=self._group)
            self.sent_bytes += flat.nbytes
            if flat.is_floating_point():
                flat /= self._number
            means = flat.split([value.numel() for value in live])
            for name, value, mean in zip(names, live, means, strict=True):
                if name in self._velocities:
                    self._step(name, mean.view(value.shape))
                else:
                    self._anchors[name].copy_(mean.view(value.shape))
                value.copy_(self._anchors[name])
        self.apart = False

    def parts(self, model: Parts, inner: Parts, stored: Collection[str] | None = None) -> Parts:
        """What a checkpoint holds, whatever it is in the middle of; collective where one is to be written.

        The model is the one that all copies last agreed on; the inner optimizers' state, and where the copies are now
        if they are apart, have a row for each copy.

        Args:
            model: the live model's, named as in the checkpoint.
            inner: of the inner optimizers.
            stored: names in a checkpoint that is to be read; None where one is to be written.
        """
        reading = stored is not None and any(name.startswith(COPY + ".") for name in stored)
        inner = self._completed(inner) if stored is None else inner
        found = [self._own(entry, tensor) for entry, tensor in inner]
        for name in self._anchors:
            entry = self._spread.map[name]
            if name in self._velocities:
                found.append((replace(entry, name=f"{MOMENTUM}.{name}"), self._velocities[name]))
            if reading or (stored is None and self.apart):
                found.append(self._own(replace(entry, name=f"{COPY}.{name}"), self._spread.local(name)))
        agreed = {f"model.{name}": anchor for name, anchor in self._anchors.items()}
        if stored is None and not self.apart:
            agreed = {}
        return [(entry, agreed.get(entry.name, tensor)) for entry, tensor in model] + found

    @torch.no_grad()
    def restored(self, stored: Collection[str]) -> None:
        """After the parts of a checkpoint with the names `stored` were filled."""
        self.apart = any(name.startswith(COPY + ".") for name in stored)
        if not self.apart:
            for name, anchor in self._anchors.items():
                self._spread.local(name).copy_(anchor)

    def describe(self) -> Decision:
        """What travels between the copies, and what that means."""
        sent = format_bytes(sum(anchor.nbytes for anchor in self._anchors.values()))
        what = f"{self._number} copies train by themselves: each process sends {sent} every {self.every} steps"
        how = f"outer_lr={self._rate:g}, outer_momentum={self._momentum:g}"
        why = f"layout.local_sgd={self.every} ({how}); DDP would send that in every step, and compute what one does"
        return Decision(what, why)

    def _step(self, name: str, mean: torch.Tensor) -> None:
        """As torch.optim.SGD takes it, the gradient being what the copies have gone, with the opposite sign."""
        anchor, velocity = self._anchors[name], self._velocities[name]
        gone = anchor - mean
        velocity.mul_(self._momentum).add_(gone)
        anchor.sub_(gone.add_(velocity, alpha=self._momentum) if self._nesterov else velocity, alpha=self._rate)

    def _completed(self, inner: Parts) -> Parts:
        """`inner` with zeros, as it begins with, for state that other copies have and this one not: it has left out all
        the updates that would have made it. The live optimizer stays without."""
        names, device = [entry.name for entry, _ in inner], self._spread.device
        digest = digest_of("\n".join(names).encode())
        if len(set(everyones(digest, self._group, device))) == 1:
            return inner
        told = everyones([_tell(entry, tensor) for entry, tensor in inner], self._group, device)
        have = {entry.name: (entry, tensor) for entry, tensor in inner}
        for name, *rest in (part for copy in told for part in copy):
            if name not in have:
                have[name] = _zeros(name, *rest)
        order = dict.fromkeys(part[0] for copy in told for part in copy)  # one for all copies
        return [have[name] for name in order]

    def _own(self, entry: Entry, tensor: torch.Tensor) -> tuple[Entry, torch.Tensor]:
        holders = tuple(rank for rank in entry.holders if rank in self._of_this_copy)
        return one_of_each(entry, self._index, self._number, holders), tensor.unsqueeze(0)

    def _messages(self) -> Iterator[list[str]]:
        """Names of one kind and device each, in order, up to MESSAGE_BYTES together.

        What all ranks of a copy hold alike is apart from what they share out: it stands at the same places in the
        messages of each of them, so that its sums have one order, and it stays alike.
        """
        kinds = {
            name: (anchor.dtype, anchor.device, _is_cut(self._spread.map[name]))
            for name, anchor in self._anchors.items()
        }
        for kind in dict.fromkeys(kinds.values()):
            names, size = list[str](), 0
            for name, anchor in self._anchors.items():
                if kinds[name] != kind:
                    continue
                if names and size + anchor.nbytes > MESSAGE_BYTES:
                    yield names
                    names, size = [], 0
                names.append(name)
                size += anchor.nbytes
            yield names


def _learnt(spread: Spread) -> list[str]:
    """The buffers that follow the samples of a copy: running statistics, and what a router balances its experts by."""
    alone = set(spread.batch_norms.own_names)  # each rank's own, which no copy shares
    owned = set(spread.batch_norms.owners) - alone
    routers = {_owner(name) for name in spread.balances.names}
    buffers = [name for name, entry in spread.map.stored.items() if entry.kind == "buffer"]
    return [name for name in buffers if name in owned or _owner(name) in routers]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_cut(entry: Entry) -> bool:
    return any(placement != "replicate" for placement in entry.placements.values())


def make_outer(spread: Spread, *, order: str) -> OuterOptimizer | None:
    """The outer optimizer, where the layout asks for one; what it does goes to the decisions of `spread`.

    Args:
        order: of the dataset.

    Raises:
        LayoutError: nobody would know which round is the last.
    """
    every = spread.mesh.layout.local_sgd
    if every is None:
        return None
    given = f"layout.local_sgd={every}"
    if order == "sharded":
        raise LayoutError(f"{given} has to know which step is the last, and data that shards itself does not say it")
    outer = OuterOptimizer(spread)
    spread.decisions += (outer.describe(),)
    return outer


def _tell(entry: Entry, tensor: torch.Tensor) -> tuple[object, ...]:
    """A part as JSON, without its values."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return entry.name, entry.shape, dtype, tensor.shape, astuple(entry.box), entry.holders


def _zeros(
    name: str, whole: list[int], dtype: str, shape: list[int], box: tuple[Any, ...], holders: list[int]
) -> tuple[Entry, torch.Tensor]:
    """The part of which another copy has told so: parts of two copies are alike."""
    offset, extent, *packed = box
    own = Box(tuple(offset), tuple(extent), *packed)
    return Entry(name, tuple(whole), dtype, own, tuple(holders)), torch.zeros(shape, dtype=getattr(torch, dtype))
