"""Do random numbers come from where they must: other ones for other samples, the same ones for the same (law 6)?

Before each micro-step the generators of python, numpy and torch are seeded by who feeds what. A model or a loss that
seeds them anew, which makes a run on one device repeatable, has all data ranks drop the same units and draw the same
noise. Torch remembers its seed, so that one rank alone sees that in each step. Of all generators the states after a
step are compared every so many steps.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch

from allranks.data.micro_step import StepBatch
from allranks.data.random_keys import cuda_devices, device_key, last_key
from allranks.parallel.mesh import Mesh
from allranks.stepping.sentinel import RoundSentinel, StepSentinel
from allranks.verdict import Verdict

REGIONLESS = ("python", "numpy")
"""What no region of a layer that is cut seeds by its rank (parallel/regions.py)."""
REMEDY = (
    "seed nothing in model, loss or step: law 6 does; for noise of your own take torch.Generator().manual_seed(...)"
)


@final
class Randomness(StepSentinel, RoundSentinel):
    """Looks at the generators right after the last backward of a step.

    Args:
        mesh: who sees which samples.
        due: whether the ranks are compared after a step (from 1).
    """

    name: ClassVar[str] = "randomness"

    def __init__(self, mesh: Mesh, due: Callable[[int], bool]) -> None:
        self._mesh, self._due = mesh, due
        # Regions of layers and sequences that are cut seed torch's generators by themselves, mid-forward.
        self._seeded_once = mesh.layout.tp == 1 and mesh.layout.cp == 1
        self._states: dict[str, int] = {}

    def look(self, which: str, batch: StepBatch) -> Verdict | None:
        if self._due(batch.step + 1):
            self._states = generator_digests()
        if not self._seeded_once:
            return None
        reseeded = next(((device, seed, due) for device, seed, due in _seeds() if seed != due), None)
        if reseeded is None:
            return None
        device, seed, due = reseeded
        what = (
            f"step {batch.step + 1}: model or loss seeds torch's generator ({device}) anew, with {seed}: "
            "every step, or every data rank, draws the same numbers"
        )
        return Verdict("reseeded", what, (f"it was seeded with {due} before the forward",), REMEDY)

    def tell(self) -> dict[str, Any]:
        return {"dp": self._mesh.dp_rank, "pp": self._mesh.coordinate("pp"), "states": self._states}

    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        seen: dict[tuple[str, int], int] = {}
        for rank, one in enumerate(told):
            for generator, state in one["states"].items():
                first = seen.setdefault((generator, state), rank)
                if told[first]["dp"] != one["dp"]:
                    who = f"ranks {first} and {rank} see other samples"
                    return _explain(step, f"{who}, but {generator}'s generator stands at the same number on both")
        kept: dict[tuple[str, int, int], int] = {}
        for rank, one in enumerate(told):
            for generator in REGIONLESS:
                first = kept.setdefault((generator, one["dp"], one["pp"]), rank)
                if told[first]["states"].get(generator) != one["states"].get(generator):
                    who = f"ranks {first} and {rank} share the same samples and layers"
                    return _explain(step, f"{who}, but {generator}'s generators stand at different numbers")
        return None


def generator_digests() -> dict[str, int]:
    """By generator a digest of where it stands; about 50 us, and no wait for a device."""
    found = {
        **plain_digests(),
        "torch": zlib.crc32(torch.default_generator.get_state().numpy().tobytes()),
    }
    for place, index in enumerate(cuda_devices()):
        # By place: the devices of another rank of this host have other numbers.
        name = f"CUDA (place {place})" if place else "CUDA"
        found[name] = zlib.crc32(torch.cuda.default_generators[index].get_state().numpy().tobytes())
    return found


def plain_digests() -> dict[str, int]:
    """The same of python's and numpy's alone."""
    return {
        "python": zlib.crc32(repr(random.getstate()).encode()),
        "numpy": zlib.crc32(repr(_numpy_state()).encode()),
    }


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, zlib.crc32(np.asarray(keys).tobytes()), *rest)


def _seeds() -> list[tuple[str, int, int]]:
    """Of each of torch's generators: its device, its seed, and the one that it was given."""
    key, devices = last_key(), cuda_devices()
    seeds = [("cpu", torch.default_generator.initial_seed(), key)]
    for place, index in enumerate(devices):
        name = "cuda" if len(devices) == 1 else f"cuda:{index}"
        seeds.append((name, torch.cuda.default_generators[index].initial_seed(), device_key(key, place)))
    return seeds


def _explain(step: int, what: str) -> Verdict:
    return Verdict("randomness_wrong", f"step {step}: {what}", ("as they stand right after the backward",), REMEDY)
