"""What travels between the stages of a pipeline: activations on, their gradients back.

Where two stages meet, both ranks know the shapes after the first time: they are a function of the shapes of the inputs
and of the model's mode (one that drops tokens does so in training), which both have, as they see the same samples. The
first time a header goes ahead.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.mesh import Mesh
from allranks.parallel.pipeline import Pipeline
from allranks.parallel.stage_run import Payload

_HEADER = 256  # int64 words: room for some forty tensors
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DTYPES = (*_FLOATING, torch.int64, torch.int32, torch.bool, torch.uint8, torch.int8)

Signature = tuple[object, ...]


def signature_of(arguments: object, module: nn.Module) -> Signature:
    """The shapes of a forward's arguments and whether `module` trains, on which those of its activations depend."""
    leaves = pytree.tree_leaves(arguments)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    trains = any(part.training for part in module.modules())
    return (torch.is_grad_enabled(), trains, *shapes)


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor that is sent to a stage.

    Attributes:
        place: which of the arguments that begin the stage it is.
        requires_grad: whether its gradient comes back.
    """

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A tensor of its kind."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@final
class Transport:
    """Sends and receives for one pipeline; every message has a counterpart on the rank that runs the other stage.

    Attributes:
        sent: (stage, signature) -> what is sent to it; known after the first time.
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh, device: torch.device) -> None:
        self.sent: dict[tuple[int, Signature], tuple[Sent, ...]] = {}
        self._pipeline = pipeline
        self._group = mesh.group("pp")
        self._device = device
        ranks = dist.get_process_group_ranks(self._group)
        self._rank_of = [ranks[mesh.layout.stage_rank(stage)] for stage in range(pipeline.last + 1)]
        self._own = mesh.rank
        self._told: set[tuple[int, Signature]] = set()  # whose header has been sent
        self._heard: set[tuple[int, Signature]] = set()  # or received
        self._under_way: list[tuple[dist.Work | None, torch.Tensor]] = []
        # Two stages of one rank hand over here, activations and gradients apart.
        self._local: dict[tuple[int, bool], deque[torch.Tensor]] = defaultdict(deque)

    def send_on(self, stage: int, payload: Payload, signature: Signature) -> None:
        """Activations to `stage`, from the one before it."""
        places = self._pipeline.crossings.get(stage)
        if places is None:
            raise LayoutError("a pipeline runs with gradients once before it runs without")
        for tensor in payload:
            self._check_kind(stage, tensor)
        found = tuple(
            Sent(place, tuple(t.shape), t.dtype, t.requires_grad) for place, t in zip(places, payload, strict=True)
        )
        self.sent.setdefault((stage, signature), found)
        if (stage, signature) not in self._told:
            self._told.add((stage, signature))
            self._post(stage, _encode(found).to(self._device), back=False)
        self.check_known(stage, payload, signature)
        for tensor in payload:
            self._post(stage, tensor.detach(), back=False)

    def check_known(self, stage: int, payload: Payload, signature: Signature) -> None:
        """Whoever receives would take what is smaller for what it was before. Raises LayoutError."""
        known = self.sent[stage, signature]
        same = [(one.shape, one.dtype) for one in known] == [(tuple(tensor.shape), tensor.dtype) for tensor in payload]
        # A gradient that is not asked for would be missing; one that is not there is none.
        if not same or any(t.requires_grad and not one.requires_grad for t, one in zip(payload, known, strict=True)):
            raise LayoutError(
                f"the activations that begin stage {stage} of the pipeline have another shape than before (or another "
                "type, or a gradient), for inputs of the same shape: a pipeline needs shapes that depend on the "
                "inputs' alone, and on the model's mode"
            )

    def receive_on(self, stage: int, signature: Signature) -> Payload:
        """The activations with which `stage` begins; () for the first one. Each is a leaf of its own graph."""
        if stage == 0:
            return ()
        if (stage, signature) not in self._heard:
            self._heard.add((stage, signature))
            found = self.hear(stage, signature)
            self.sent[stage, signature] = found
            self._pipeline.crossings.setdefault(stage, tuple(one.place for one in found))
        metas = self.sent[stage, signature]
        received = (self._take(stage - 1, meta.empty(self._device), to=stage, back=False) for meta in metas)
        return tuple(t.requires_grad_(meta.requires_grad) for t, meta in zip(received, metas, strict=True))

    def hear(self, stage: int, signature: Signature) -> tuple[Sent, ...]:
        """What `stage` will be sent for inputs like these, from the header that goes ahead of the first."""
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
        return _decode(self._take(stage - 1, header, to=stage, back=False).tolist())

    def hear_own(self, stage: int, signature: Signature) -> tuple[Sent, ...] | None:
        """The same where the stage before runs on this rank, too, and has handed over; None where it does not."""
        if self._rank_of[stage - 1] != self._own:
            return None
        self._local[stage, False].popleft()  # the header
        return self.sent[stage, signature]

    def forget(self, signature: Signature) -> None:
        """What is sent for inputs like these is unknown again: on all ranks of the pipeline, or headers get lost."""
        for known in ((stage, signature) for stage in range(1, len(self._rank_of))):
            self.sent.pop(known, None)
            self._told.discard(known)
            self._heard.discard(known)

    def send_back(self, stage: int, received: Payload) -> None:
        """The gradients of what `stage` had received, to the stage before it."""
        for tensor in received:
            if tensor.requires_grad:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._post(stage - 1, gradient, back=True)

    def receive_back(self, stage: int, signature: Signature) -> list[torch.Tensor | None]:
        """The gradients of what was sent to `stage`."""
        metas = self.sent[stage, signature]
        return [
            self._take(stage, meta.empty(self._device), to=stage - 1, back=True) if meta.requires_grad else None
            for meta in metas
        ]

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._under_way:
            if work is not None:
                work.wait()
        self._under_way.clear()

    def _check_kind(self, stage: int, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
            kind = f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
            raise LayoutError(
                f"{self._pipeline.plan.points[stage - 1]}, where a stage of the pipeline begins, is called with a "
                f"{kind} tensor that modules before it have made, and such ones are not sent: turn it into one of "
                "another type (torch.view_as_real, to_dense), or cut the model elsewhere with hints().split_before"
            )
        here, there = tensor.device.type, self._device.type
        if here != there:
            raise LayoutError(
                f"{self._pipeline.plan.points[stage - 1]}, where a stage of the pipeline begins, is called with a "
                f"tensor on {here} that modules before it have made, and stages send what lies on {there}: move it "
                "there and back inside the modules, or cut the model elsewhere with hints().split_before"
            )

    def _post(self, stage: int, tensor: torch.Tensor, *, back: bool) -> None:
        if self._rank_of[stage] == self._own:
            self._local[stage, back].append(tensor)
            return
        tensor = tensor.contiguous()
        # Kept until it has left: nobody else holds it.
        self._under_way.append((dist.isend(tensor, self._rank_of[stage], group=self._group), tensor))

    def _take(self, stage: int, empty: torch.Tensor, *, to: int, back: bool) -> torch.Tensor:
        if self._rank_of[stage] == self._own:
            return self._local[to, back].popleft()
        dist.recv(empty, self._rank_of[stage], group=self._group)
        return empty


def _encode(metas: Sequence[Sent]) -> torch.Tensor:
    words = [len(metas)]
    for meta in metas:
        words += [meta.place, int(meta.requires_grad), _DTYPES.index(meta.dtype), len(meta.shape), *meta.shape]
    if len(words) > _HEADER:
        raise LayoutError(f"{len(metas)} tensors pass between two stages of the pipeline, which is more than fit")
    return torch.tensor(words + [0] * (_HEADER - len(words)), dtype=torch.int64)


def _decode(words: list[int]) -> tuple[Sent, ...]:
    number, *words = words
    found = []
    for _ in range(number):
        place, requires_grad, dtype, num_dims, *words = words
        found.append(Sent(place, tuple(words[:num_dims]), _DTYPES[dtype], bool(requires_grad)))
        words = words[num_dims:]
    return tuple(found)
