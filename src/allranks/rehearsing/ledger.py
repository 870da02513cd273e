"""Memory by storage: when each begins and ends to exist, of which category it is, and which module asked for it.

A storage that several tensors view is one. FSDP2 gives gathered memory back by resizing its storage to nothing: so
resizing is watched, too. What an operator makes lies in the memory in which its inputs lie, the device's or the host's.
The step is a row of stretches (`Stretch`), and a storage's life is written down as changes in
them, so that a stretch which repeats can be repeated on paper.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch

from allranks.rehearsal import Category

Memory = Literal["device", "pinned", "pageable"]
"""The device's, and the host's of two kinds: pinned is what copies can go to while the device computes."""


@final
@dataclass(slots=True)
class Stored:
    """One storage.

    Attributes:
        num_bytes: now; category, module: what it is and whose; None until somebody says.
        shares: whose parts of it are, where several modules hold some: module -> bytes.
        in_backward: whether it was made there.
        memory: where it lies, for the whole of its life.
    """

    num_bytes: int
    module: str = ""
    category: Category | None = None
    in_backward: bool = False
    memory: Memory = "device"
    shares: Mapping[str, int] = field(default_factory=dict)

    @property
    def heirs(self) -> Memory:
        """Where what is made from it lies."""
        return "device" if self.memory == "device" else "pageable"


@final
@dataclass(slots=True)
class Stretch:
    """A part of the step: the changes of memory in it, in order.

    Attributes:
        phase, block, micro_step: where in the step it is; block "" is outside of all blocks.
        changes: (storage, bytes more or less).
        messages: of collectives, in order; flops: in it.
        transfers: (what, to which of "host" and "device", bytes), in order.
        waits: (messages, FLOPs) that come before each wait for gathered parameters.
        deeds: (number of changes before it, what a unit does from there on).
    """

    phase: str
    block: str = ""
    micro_step: int = 0
    changes: list[tuple[Stored, int]] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    flops: float = 0.0
    deeds: list[tuple[int, Any]] = field(default_factory=list)
    transfers: list[tuple[str, str, int]] = field(default_factory=list)
    waits: list[tuple[int, float]] = field(default_factory=list)


@final
class Ledger:
    """All storages that are alive, from the moment each is first seen.

    Attributes:
        stretches: of what was recorded; the last one is going on.
        resting: what was alive when the recording began.
        module: whose what is made now is.
        place: (category, module) of what is made now, where that is known from the place; None: it is not.
        gathering: the unit whose parameters are asked for now; "": of none.
        round_to: bytes that the device's allocator hands out at once.
        uses_host: whether anything has ever lain in the host's memory.
    """

    def __init__(self, round_to: int = 1) -> None:
        self.stretches: list[Stretch] = []
        self.resting: list[tuple[Stored, int]] = []
        self.module = ""
        self.place: tuple[Category, str] | None = None
        self.gathering = ""
        self.uses_host = False
        self._making: Memory | None = None
        self._round_to = round_to
        self._known: dict[int, tuple[Stored, Any]] = {}
        self._recording = False

    def find(
        self, tensor: torch.Tensor, made_from: Iterable[torch.Tensor] = (), category: Category | None = None
    ) -> Stored:
        """The storage of a tensor, known from now on.

        Args:
            made_from: what it was made from; where one of them waits on the host, so does this.
            category: of a storage that is new, where `place` does not say it.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None:
            return known[0]
        category, module = self.place or (category, self.module)
        memory = self._making or self._memory_of(made_from)
        self.uses_host |= memory != "device"
        stored = Stored(self._rounded(storage.nbytes(), memory), module, category, _in_backward(), memory)

        def forget(_: object) -> None:
            # Another storage may have its place by now.
            if key in self._known and self._known[key][0] is stored:
                del self._known[key]
            self._change(stored, -stored.num_bytes)
            stored.num_bytes = 0

        self._known[key] = (stored, weakref.ref(storage, forget))
        self._change(stored, stored.num_bytes)
        return stored

    def mark(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Say what a storage is, for the whole of its life."""
        stored = self.find(tensor)
        stored.category = category
        if module is not None:
            stored.module = module

    def mark_parts(self, parts: Iterable[tuple[torch.Tensor, str]], category: Category) -> None:
        """Say what tensors are and whose; those that lie in one storage share it, as gradients reduced together do."""
        owners: dict[int, tuple[Stored, Counter[str]]] = {}
        for tensor, module in parts:
            self.mark(tensor, category, module)
            stored = self.find(tensor)
            owners.setdefault(id(stored), (stored, Counter()))[1][module] += tensor.nbytes
        for stored, shares in owners.values():
            stored.shares = shares if len(shares) > 1 else {}

    @contextmanager
    def making(self, memory: Memory) -> Iterator[None]:
        """Inside, what is new lies there."""
        outer, self._making = self._making, memory
        try:
            yield
        finally:
            self._making = outer

    def move(self, tensor: torch.Tensor, memory: Memory) -> None:
        """It has lain there from the beginning; said before the recording begins."""
        assert not self._recording
        stored = self.find(tensor)
        stored.memory, stored.num_bytes = memory, self._rounded(tensor.untyped_storage().nbytes(), memory)

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """See storages that are resized in place."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            known = self._known.get(storage._cdata)
            if known is not None:
                stored, now = known[0], self._rounded(storage.nbytes(), known[0].memory)
                self._change(stored, now - stored.num_bytes)
                stored.num_bytes = now
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def begin(self, phase: str, block: str = "", micro_step: int = 0) -> None:
        """What comes is of another stretch; the first call begins the recording."""
        if not self._recording:
            self._recording = True
            self.resting = [(stored, stored.num_bytes) for stored, _ in self._known.values()]
        self.stretches.append(Stretch(phase, block, micro_step))

    def end(self) -> None:
        """Record nothing more."""
        self._recording = False

    @property
    def now(self) -> Stretch | None:
        """The stretch that is going on."""
        return self.stretches[-1] if self._recording else None

    def _change(self, stored: Stored, num_bytes: int) -> None:
        if self._recording and num_bytes:
            self.stretches[-1].changes.append((stored, num_bytes))

    def _memory_of(self, made_from: Iterable[torch.Tensor]) -> Memory:
        # A tensor without dims may lie anywhere beside the others.
        keys = (tensor.untyped_storage()._cdata for tensor in made_from if tensor.dim())
        there = any(key in self._known and self._known[key][0].memory != "device" for key in keys)
        return "pageable" if there else "device"

    def _rounded(self, num_bytes: int, memory: Memory) -> int:
        if self._round_to == 1 or memory == "pageable":
            return num_bytes
        if memory == "pinned":  # ATen/core/CachingHostAllocator.h, allocate
            return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
        return -(-num_bytes // self._round_to) * self._round_to


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
