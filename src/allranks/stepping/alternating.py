"""Passes of a Task with its own `step`: a generator that yields (name, loss sum, targets), for GANs and the like.

With M micro-steps M generators advance in turn. After each yield the backward runs; when the M-th has yielded a name,
the gradients of the parameters of that optimizer are reduced, the caller updates them, and what the backward left on
other parameters is dropped.

Under float16 a turn's losses are divided by the targets that its first micro-step promises, and then scaled: what that
was wrong by is made good where gradients are divided (training/own/scaling.py does likewise).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from allranks import fault_points
from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import mix, seed_all
from allranks.errors import LayoutError, TaskError
from allranks.parallel.average import average_gradients
from allranks.stepping.buffer_check import FollowingBuffers
from allranks.stepping.fed import fed
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.passes import Forward, Passes, Scale, StepSums, ledger_of, micro_forward, tell_nonfinite

Yielded = tuple[str, torch.Tensor, int]

COUPLES_OWN_ONLY = (
    "coupled = True, but nothing is gathered, so each data-parallel rank would couple its own samples only: take the "
    "rows of all ranks by self.world.gather(rows), or use --nproc 1"
)


def add_up(counts: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """The sum of each of `counts` over the ranks of `group`; collective, on the host."""
    told = torch.tensor(counts, dtype=torch.float64)
    dist.all_reduce(told, group=group)
    found: list[float] = told.tolist()
    return found


class AlternatingPasses(Passes):
    """Rounds of forward, yield, backward over the micro-steps, until the generators end.

    The modules must not be wrapped in DDP, which would wait for parameters that a loss does not touch: whole gradients
    are reduced here, by name. FSDP reduces what it has cut in the backward.

    Args:
        optimizers: names that may be yielded, and the parameters of each.
        group: the data-parallel ranks, over which targets are summed; None for one rank. It takes tensors on the host
            too.
    """

    def __init__(self, forward: Forward, optimizers: Optimizers, group: dist.ProcessGroup | None) -> None:
        self._forward = forward
        self._spread = forward.spread
        self._optimizers = optimizers
        self._group = group
        self._following = FollowingBuffers()
        self._must_gather = forward.task.coupled and forward.spread.mesh.layout.dp > 1
        self._whole = [p for p in self._spread.trainable().values() if not isinstance(p, DTensor)]

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        modules = self._spread.modules
        models = modules.get("", modules)
        generators = [iter(self._forward.task.step(models, self._forward.place(m.batch))) for m in batch.micro_steps]
        for turn in count():
            yielded, expected = self._turn(generators, batch.micro_steps, turn, scale)
            which, loss, targets = yielded or (None, None, 0)
            everyones = self._reduce(which, targets, turn)
            if which is None or loss is None:
                if self._must_gather:
                    raise TaskError(f"{type(self._forward.task).__name__}.step: {COUPLES_OWN_ONLY}")
                return
            yield StepSums(which, loss, everyones, ledger_of(batch) if turn == 0 else 0, expected)
            self._drop_gradients()

    def _turn(
        self, generators: Sequence[Iterator[Yielded]], micro_steps: Sequence[MicroStep], turn: int, scale: Scale
    ) -> tuple[Yielded | None, torch.Tensor | None]:
        names: set[str | None] = set()
        total, targets = torch.zeros((), dtype=torch.float64, device=self._spread.device), 0
        expected, factor = None, None
        last = len(micro_steps) - 1
        for index, (generator, micro_step) in enumerate(zip(generators, micro_steps, strict=True)):
            self._spread.synchronise(index == last)
            yielded = self._advance(generator, micro_step, turn)
            self._following.compare(self._spread, fed=micro_step.weight > 0)
            names.add(None if yielded is None else yielded[0])
            if self._spread.precision.scales and expected is None:
                first = 0 if yielded is None else yielded[2] * micro_step.weight
                expected = self._expect(first * len(micro_steps))
                factor = (scale / expected).float()
            if yielded is not None:
                _, loss, num_targets = yielded
                fault_points.reach("backward")
                scaled = loss * float(micro_step.weight) if factor is None else loss * (factor * micro_step.weight)
                scaled.backward(tell_nonfinite(loss) if micro_step.weight else None)
                total += loss.detach().double() * micro_step.weight
                targets += num_targets * micro_step.weight
        if names == {None}:
            return None, None
        self._spread.check_reduced()
        name = next(iter(names))
        if len(names) > 1 or name is None:
            raise TaskError(_disagreement(names, turn, "micro-steps"))
        return (name, total, targets), expected

    def _expect(self, targets: int) -> torch.Tensor:
        """The world's targets of a turn, at least 1, where this rank takes its own to be so many; collective."""
        (counted,) = [float(targets)] if self._group is None else add_up([float(targets)], self._group)
        return torch.full((), max(1.0, counted), dtype=torch.float64, device=self._spread.device)

    def _advance(self, generator: Iterator[Yielded], micro_step: MicroStep, turn: int) -> Yielded | None:
        fault_points.reach("forward")
        seed_all(mix(micro_step.random_key, turn))
        own = micro_forward(self._spread, micro_step.weight)
        with fed(micro_step), own as rows, self._forward.autocast():
            yielded: object = next(generator, None)
        if rows.asked and self._spread.mesh.layout.local_sgd is not None:
            raise LayoutError(
                f"{type(self._forward.task).__name__}.step gathers the rows of all ranks, and with layout.local_sgd="
                f"{self._spread.mesh.layout.local_sgd} copies train by themselves between two meetings: leave it out, "
                "or use --nproc 1"
            )
        self._must_gather = self._must_gather and not rows.asked
        if yielded is None:
            return None
        if not isinstance(yielded, tuple) or len(yielded) != 3 or not isinstance(yielded[1], torch.Tensor):
            raise TaskError(f"step() yielded {type(yielded).__name__}: yield (name, loss_sum, targets)")
        which, loss, targets = yielded
        if which not in self._optimizers.by_name:
            known = ", ".join(map(repr, self._optimizers.by_name))
            raise TaskError(f"step() yielded the name {which!r}; the optimizers are {known}")
        return which, loss, int(targets)

    def _reduce(self, which: str | None, targets: int, turn: int) -> torch.Tensor:
        """The world's targets, after the mean over the ranks of every whole gradient of `which`; collective.

        What was yielded (None: nothing more) and who has a gradient at all is agreed on the host, beside the targets:
        the device waits for nothing, and the vector has one length whatever was yielded.
        """
        names = [*self._optimizers.by_name, None]
        due = set(map(id, self._optimizers.parameters(which))) if which is not None else set()
        flags = [float(p.grad is not None and id(p) in due) for p in self._whole]
        counts = [float(targets), *(float(name == which) for name in names), *flags]
        if self._group is not None:
            counts = add_up(counts, self._group)
            told = [name for name, ranks in zip(names, counts[1:], strict=False) if ranks]
            if len(told) > 1:
                raise TaskError(_disagreement(told, turn, "ranks"))
            used = [p for p, ranks in zip(self._whole, counts[1 + len(names) :], strict=True) if ranks]
            experts = self._spread.experts
            cut = {} if experts is None else experts.parameters
            if experts is not None:
                experts.reduce({id(p) for p in used if id(p) in cut})
            group = self._spread.mesh.gradient_group
            if group is not None:  # else this is one of the copies of local_sgd, by itself
                average_gradients([p for p in used if id(p) not in cut], [group], self._spread.divisor, used=True)
        return torch.full((), counts[0], dtype=torch.float64, device=self._spread.device)

    def _drop_gradients(self) -> None:
        for parameter in self._spread.trainable().values():
            parameter.grad = None


def _disagreement(names: Iterable[str | None], turn: int, among: str) -> str:
    found = ", ".join(sorted("nothing more" if name is None else repr(name) for name in names))
    return f"step(): in turn {turn + 1} the {among} yielded {found}: all must yield one name"
