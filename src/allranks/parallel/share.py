"""The devices of one process, where it has several: its share of the machine's, numbered from 0 in it.

Rules of `[layout.placement]` name them so: with two processes on eight GPUs, the second one's `cuda:0` is the machine's
fifth. On the CPU `cpu:0` to `cpu:7` are names for one memory: a placement can be tried there, its transfers counted.
"""

from dataclasses import dataclass, replace

import torch

from allranks.errors import LayoutError
from allranks.layout import Layout

CPU_NAMES = 8
BALANCED_CPUS = 2


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a process.

    Attributes:
        name: as rules have it ("cuda:0" is the first of the share).
        device: as torch has it.
    """

    name: str
    device: torch.device

    def __str__(self) -> str:
        same = self.device.type == "cpu" or str(self.device) == self.name
        return self.name if same else f"{self.name} ({self.device} here)"


@dataclass(frozen=True, slots=True)
class Share:
    """The devices of one process.

    Attributes:
        places: all that rules may name, accelerators first.
        used: those that a balanced placement takes.
        home: where batch and loss are: the last of those in use, since the output then mostly is there already.
    """

    places: tuple[Place, ...]
    used: tuple[Place, ...]
    home: Place

    @property
    def first(self) -> Place:
        """Where what no rule names lies."""
        return self.used[0]

    def find(self, name: str) -> Place:
        """The device of that name; LayoutError naming those there are."""
        full = f"{name}:0" if name in ("cpu", "cuda") else name
        found = next((place for place in self.places if place.name == full), None)
        if found is None:
            accelerators = [place.name for place in self.places if place.device.type != "cpu"]
            there = ", ".join([*accelerators, f"cpu:0 to cpu:{CPU_NAMES - 1} (one memory)"])
            raise LayoutError(f"[layout.placement] names device {name!r}, and this process has {there}")
        return found


def share_of(layout: Layout, accelerators: tuple[torch.device, ...] = ()) -> Share:
    """The Share of a process with these accelerators. Raises LayoutError where a rule names another device."""
    cpu = torch.device("cpu")
    cuda = tuple(Place(f"{device.type}:{index}", device) for index, device in enumerate(accelerators))
    cpus = tuple(Place(f"cpu:{index}", cpu) for index in range(CPU_NAMES))
    used = cuda or cpus[:BALANCED_CPUS]
    share = Share((*cuda, *cpus), used, used[-1])
    named = [share.find(device) for _, device in layout.placement]
    if not named:
        return share
    # What no rule names lies on the first one: it is in use, too.
    among = [place for place in (cuda or cpus) if place in named or place == share.first]
    return replace(share, home=among[-1])
