"""The guard of a step: what is not finite reaches no parameter, under any layout, and no rank has to ask another.

The global norm of the gradients is the same number on every rank and not finite where one of them is not; a loss that
is not finite makes its gradients so (passes.py). So every rank judges by the norm, which the step computes anyway, and
all judge alike. On the CPU the host looks at it before the update. Elsewhere the judgement stays on the device, and an
optimizer whose kernels can skip by themselves obeys it there; another one has the host wait.

What was judged goes into the next step's agreement (agreement.py): the loop, the journal and the search for the origin
learn from there, a step later.
"""

import math
from collections.abc import Sequence
from typing import final

import torch

from allranks.parallel.batchnorm import BATCH_STATISTICS
from allranks.parallel.module_state import SMALL_BYTES
from allranks.parallel.spread import Spread
from allranks.stepping.spikes import SpikeJudge


@final
class StepGuard:
    """Judges every step of a run, and puts back what the forwards of one that is left out have learnt.

    Args:
        spikes: also leaves out steps whose norm is a spike; the host then waits for every norm. None: does not.
    """

    def __init__(self, spread: Spread, spikes: SpikeJudge | None = None) -> None:
        self._spread, self._spikes = spread, spikes
        self._buffers = LearntBuffers(spread)

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        """What it keeps from step to step: learnt buffers as they were, and of spikes what was seen."""
        seen = () if self._spikes is None else tuple(tensor for _, tensor in self._spikes.parts())
        return (*self._buffers.kept, *seen)

    def begin(self) -> None:
        """Before the forwards of a step."""
        self._buffers.keep()

    def judge(self, norm: torch.Tensor, step: int = 0) -> torch.Tensor | None:
        """1.0 where the update of step `step` (from 1) is to be left out, else 0.0: float32, 0-dim, beside the norm.

        On the CPU the value is at hand: None where there is nothing to leave out. Collective where spikes are judged.
        """
        if self._spikes is not None and self._spikes.judge(norm.item(), step):
            return torch.ones((), device=norm.device)
        if norm.device.type == "cpu":
            return None if math.isfinite(norm.item()) else torch.ones(())
        return (~norm.isfinite()).to(torch.float32)

    def abandon(self) -> None:
        """What the forwards of a step have learnt that is not made is put back."""
        self._buffers.put_back(torch.ones(()))

    def finish(self, skipped: torch.Tensor | None) -> None:
        """After the updates of a step, of which all are left out where `skipped` is 1.0."""
        if skipped is None:
            return
        self._buffers.put_back(skipped)
        if self._spread.hook is not None and self._spread.hook.powersgd is not None:
            self._spread.hook.powersgd.begin_anew(skipped)


@final
class LearntBuffers:
    """The buffers that training forwards change, running statistics above all, as they were before the step.

    In the first step all are kept, and from then on those that it has changed, which may be large; statistics, and what
    is small (`SMALL_BYTES`), for good: a later step may enter a layer that the first one passed by.
    """

    def __init__(self, spread: Spread) -> None:
        self._tensors = spread.tensors
        self._names = [name for name, entry in spread.map.items() if entry.kind == "buffer" and entry.alias_of is None]
        self._kept: list[torch.Tensor] = []
        self._settled = not self._names

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names; of all buffers until the first step is over."""
        return tuple(self._names)

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """The values, in the order of the names."""
        return tuple(self._kept)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the values."""
        if not self._settled and self._kept:
            self._settle()
        if self._names:
            live = self._live()
            if len(self._kept) == len(live) and all(map(_alike, self._kept, live)):
                torch._foreach_copy_(self._kept, live)
            else:
                self._kept = [buffer.clone() for buffer in live]

    @torch.no_grad()
    def put_back(self, skipped: torch.Tensor) -> None:
        """The values of `keep` again, where `skipped` is 1.0; a buffer that has another shape by now stays."""
        for buffer, kept in zip(self._live() if self._names else (), self._kept, strict=True):
            if _alike(buffer, kept):
                buffer.copy_(torch.where(skipped.to(buffer.device) > 0, kept, buffer))

    def _settle(self) -> None:
        """Before the second step: let go large tables that the first has left alone. Kernels may count no version."""
        pairs = zip(self._names, self._live(), self._kept, strict=True)
        self._names = [
            name
            for name, live, kept in pairs
            if live.nbytes <= SMALL_BYTES
            or isinstance(self._tensors.place_of(name)[0], BATCH_STATISTICS)
            or not (_alike(live, kept) and torch.equal(live, kept))
        ]
        self._kept, self._settled = [], True

    def _live(self) -> list[torch.Tensor]:
        # Looked up each time: a forward may put another tensor in a buffer's place.
        return [self._tensors[name].detach() for name in self._names]


def any_of(judged: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Whether one of the updates of a step was left out, as `judge` says it."""
    found = [skipped for skipped in judged if skipped is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack(found).amax()


def all_of(judged: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Whether all updates of a step were left out, as `judge` says it."""
    found = [skipped for skipped in judged if skipped is not None]
    if len(found) < len(judged) or not found:
        return None
    return found[0] if len(found) == 1 else torch.stack(found).amin()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
