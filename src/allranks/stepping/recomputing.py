"""Does a device compute what another one does? Now and then the gradients of one micro-step are computed twice.

Every rank computes those of its own first micro-step, and then those of its neighbour's, with the same random numbers
and before anything is reduced: two devices have computed each of them, and the bits must be the same. Under hsdp that
is copies of the model instead of ranks: those of one sum their gradients before these are compared. A device that is
at fault in the same way each time differs from both of its neighbours, and from three ranks on that names it. Where
nobody else could compute the same (see `can_swap`) a rank computes its own twice: that finds what comes and goes.

Nothing of it stays in the run: parameters are not touched, gradients go, buffers and generators are as before.
"""

import math
import platform
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from allranks.checkpointing.parts import tensor_digest
from allranks.config import Config
from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import generators_kept
from allranks.errors import ConfigError
from allranks.layout import Layout
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones
from allranks.stepping.passes import Forward, PlainPasses, buffers_kept
from allranks.stepping.swapping import Parcel
from allranks.stepping.world import Processes
from allranks.task import Task, has_step
from allranks.verdict import Decision, Verdict

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 6e-2}
"""Where bits may differ: so much of a tensor's norm may its random projection differ by, by the type of products."""
OF_LARGEST = 1e-3
"""A norm counts as at least so much of the largest one: what is numerically zero is noise."""
SHOWN = 8
BLOCK = 1 << 22  # numbers that are widened at once
NONE = (0.0, 0.0)

Row = tuple[int, float, float]
"""Digest of the bits, norm and projection of this rank's part of a gradient (0, 0 where bits decide)."""
Rows = dict[str, Row]
"""By logical name."""


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """A gradient that two computations of the same did not give alike.

    Attributes:
        rank: whose samples they were, which has computed it first.
        by: who has computed it again; the same rank where none of the others could.
        names: of the tensors, by logical name.
    """

    rank: int
    by: int
    names: tuple[str, ...]


@final
class Recomputing:
    """The sentinel of gradients.

    Args:
        passes: make the gradients of the run.
        every: steps between two looks.
        group: the ranks that can compute each other's gradients; None: each computes its own twice.
        shards: the ranks that sum these with this one before they are compared; None where it is alone.
        world: all ranks; None for one.

    What it does goes to the decisions of `spread`.
    """

    name: ClassVar[str] = "gradients"

    def __init__(
        self,
        passes: PlainPasses,
        spread: Spread,
        every: int,
        group: dist.ProcessGroup | None,
        world: dist.ProcessGroup | None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self._passes, self._spread, self._every = passes, spread, every
        self._group, self._world, self._shards = group, world, shards
        kernels = everyones(_kernels(spread.device), world, spread.device)
        self._exact = all(kernels) and (group is None or len(set(kernels)) == 1)
        # Of more than two terms NCCL's sum depends on the way that it goes, which may be another one for each copy.
        self._exact &= shards is None or shards.size() <= 2 or spread.device.type == "cpu"
        self._alike_at = 0
        self._own, self._again = Rows(), Rows()
        who = "each rank computes its own" if group is None else "its neighbour computes what a rank has computed"
        how = "bit by bit" if self._exact else f"within {self._bound():g} of their norm"
        what = f"every {every} steps the gradients of a micro-step are computed twice, and compared {how}"
        spread.decisions += (Decision(what, f"guard.recompute_every={every}; {who}"),)

    def due(self, step: int) -> bool:
        """Whether it looks after step `step` (from 1)."""
        return step % self._every == 0

    def tell(self, batch: StepBatch) -> dict[str, Any]:
        """Compute twice; what this rank tells of it, as JSON; collective."""
        with generators_kept(self._spread.bare()):
            mine, other, whose = self._exchange(batch.micro_steps[0])
            self._own = self._gradients(mine)
            self._again = self._gradients(other)
        mesh = self._spread.mesh
        together = mesh.dp_rank if self._shards is None else mesh.coordinate("dp_replicate")
        return {"of": whose, "together": together, "totals": [_total(self._own), _total(self._again)]}

    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        """What is not alike, by what all ranks tell, in their order; collective where bits differ."""
        pairs = [(one["of"], rank) for rank, one in enumerate(told)]
        apart = [(of, by) for of, by in pairs if told[of]["totals"][0] != told[by]["totals"][1]]
        if not apart:
            self._alike_at = step
            return None
        mine = [socket.gethostname(), self._own, self._again]
        hosts, own, again = zip(*everyones(mine, self._world, self._spread.device), strict=True)
        bound = None if self._exact else self._bound()
        names = [differing(own[of], again[by], bound) for of, by in apart]
        found = [Difference(*pair, those) for pair, those in zip(apart, names, strict=True) if those]
        if not found:
            self._alike_at = step
            return None
        return explain(found, hosts, [one["together"] for one in told], step, self._alike_at)

    def _exchange(self, mine: MicroStep) -> tuple[MicroStep, MicroStep, int]:
        """This rank's micro-step as a neighbour has it, the neighbour's, and whose that is: this rank's own where
        nobody else's can be had.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self._group is None:
            return mine, mine, rank
        parcel = Parcel(mine.batch, [mine.weight, mine.random_key, rank])
        batch, (weight, key, whose) = parcel.swap(self._group, self._spread.device)
        mine = replace(mine, batch=parcel.again())
        # One that keeps its own among others that have swapped would give a sum that nobody else has.
        if not all(everyones(batch is not None, self._shards, self._spread.device)):
            return mine, mine, rank
        return mine, replace(mine, batch=batch, weight=weight, random_key=key), whose

    def _gradients(self, micro_step: MicroStep) -> Rows:
        with buffers_kept(self._spread, unless=False):  # each of the two passes begins with the same ones
            self._passes.backward_alone(micro_step)
        parts = self._spread.take_held_back()
        for name, parameter in self._spread.trainable().items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                parts[name] = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        self._spread.path.take()
        return {
            name: (tensor_digest(part, (0,) * part.dim()), *(NONE if self._exact else measure(name, part)))
            for name, part in parts.items()
        }

    def _bound(self) -> float:
        precision = self._spread.precision
        return BOUNDS[precision.compute or precision.parameters]


def differing(one: Rows, other: Rows, bound: float | None) -> tuple[str, ...]:
    """The names whose gradients are not alike: in their bits, or (`bound`) by more than that part of their norm."""
    names = [
        name for name in {**one, **other} if name not in one or name not in other or one[name][0] != other[name][0]
    ]
    if bound is None:
        return tuple(names)
    largest = max((row[1] for row in one.values() if math.isfinite(row[1])), default=0.0)
    return tuple(name for name in names if not _near(one.get(name), other.get(name), bound, largest))


def explain(
    found: Sequence[Difference], hosts: Sequence[str], together: Sequence[int], step: int, alike_at: int
) -> Verdict:
    """Rank, step and tensor in words: who is part of every difference is at fault.

    Ranks that compute the same samples together (tp, cp), or sum their gradients (the shards of a copy), have one fault
    together: what one of them computes wrongly comes out of the others, too.

    Args:
        hosts: by rank.
        together: by rank: a number that those ranks have in common.
        alike_at: the step after which all were alike; 0: never compared.
    """
    first = found[0]
    involved = {rank for one in found for rank in (one.rank, one.by)}
    at_fault = set.intersection(*({together[one.rank], together[one.by]} for one in found))
    suspects = {rank for rank in involved if together[rank] in at_fault} or involved
    names = " or ".join(f"rank {rank} ({hosts[rank]})" for rank in sorted(suspects))
    more = f" (and {len(first.names) - 1} more)" if len(first.names) > 1 else ""
    alone = all(one.rank == one.by for one in found)
    how = "a second time" if alone else "than another rank for the same samples"
    what = f"after step {step} {names} computes other gradients {how}: {first.names[0]}{more}"
    evidence = [
        f"of the samples of rank {one.rank}, rank {one.rank} and rank {one.by} have not computed the same: "
        f"{', '.join(one.names[:SHOWN])}{', ...' if len(one.names) > SHOWN else ''}"
        for one in found[:SHOWN]
    ]
    evidence.append(f"after step {alike_at} all were alike" if alike_at else "they have not been compared before")
    good = f"a checkpoint of step {alike_at} or before" if alike_at else "the newest checkpoint before it"
    move = f"take the device of {names} out of service and test it; resume from {good}"
    return Verdict("gradients_differ", what, tuple(evidence), move)


def can_swap(layout: Layout, *, fixed: bool) -> bool:
    """Whether another data-parallel rank, or another copy's ranks, can compute a rank's gradients with the same bits.

    Not where they hold other parts or other values of the parameters, nor (`fixed`) where it matters which samples
    share a forward.
    """
    others = layout.copies if layout.fully_sharded else layout.dp
    return others > 1 and layout.ep == 1 and layout.local_sgd is None and not fixed


def make_recomputing(config: Config, forward: Forward, processes: Processes, *, fixed: bool) -> Recomputing | None:
    """The sentinel of a run whose config asks for it; collective then.

    Args:
        fixed: whether it matters which samples share a forward.

    Raises:
        ConfigError: a micro-step cannot be made again by itself.
    """
    every, layout = config.guard.recompute_every, processes.mesh.layout
    if not every or Recomputing.name in config.guard.muted:
        return None
    check_recomputing(forward.task, config, layout)
    group = shards = None
    if can_swap(layout, fixed=fixed):
        mesh = processes.mesh
        group = mesh.group("dp_replicate") if layout.fully_sharded else processes.data_group
        shards = mesh.group("dp_shard") if layout.fully_sharded and layout.dp_shard > 1 else None
    return Recomputing(PlainPasses(forward), forward.spread, every, group, processes.world_group, shards)


def check_recomputing(task: Task, config: Config, layout: Layout) -> None:
    """See that a micro-step can be made again by itself, where a config asks for it. Raises ConfigError."""
    asked = f"guard.recompute_every={config.guard.recompute_every} makes one micro-step again"
    if not config.guard.recompute_every:
        return
    if has_step(task):
        named = type(task).__name__
        raise ConfigError(f"{asked}, and {named} has a step() of its own, which may keep state: set it to 0")
    if layout.pp > 1:
        raise ConfigError(f"{asked}, and with pp={layout.pp} all of a step pass the stages together: set it to 0")


def measure(name: str, gradient: torch.Tensor) -> tuple[float, float]:
    """(norm, projection on random signs, which are the same wherever a tensor has this name)."""
    square = projection = torch.zeros((), dtype=torch.float64, device=gradient.device)
    generator = torch.Generator(gradient.device).manual_seed(zlib.crc32(name.encode()))
    for block in gradient.detach().reshape(-1).split(BLOCK):
        signs = torch.randint(0, 2, block.shape, generator=generator, device=block.device, dtype=torch.int8) * 2 - 1
        wide = block.double()
        square, projection = square + wide.dot(wide), projection + wide.dot(signs.double())
    return float(square.sqrt()), float(projection)


def _near(one: Row | None, other: Row | None, bound: float, largest: float) -> bool:
    """The expectation of the projections' squared difference is the square of the tensors' distance.

    What is not finite has no distance: it is alike where both computations found it so.
    """
    if one is None or other is None:
        return False
    if not math.isfinite(one[2]) or not math.isfinite(other[2]):
        return math.isfinite(one[2]) == math.isfinite(other[2])
    return abs(one[2] - other[2]) <= bound * max(one[1], OF_LARGEST * largest)


def _total(rows: Rows) -> int:
    return zlib.crc32(repr(sorted((name, digest) for name, (digest, _, _) in rows.items())).encode())


def _kernels(device: torch.device) -> str:
    """What has to be alike where bits are compared; "" where they may differ from one time to the next."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.are_deterministic_algorithms_enabled() else ""
    return f"{_processor()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"


def _processor() -> str:
    """The processor's model, by which kernels are chosen."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
