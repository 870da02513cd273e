"""What BatchNorm means over several data-parallel ranks: `layout.batchnorm`.

    sync        statistics over the samples of all of them, and all positions: what one device computes (law 4)
    local       each rank's own samples, and its own running statistics
    broadcast   each rank's own samples, and the running statistics of the first rank

The modules stay what they are. Where statistics are synchronised, `functional.batch_norm` means the synchronised one
during their forward, so that a kind of BatchNorm with a forward of its own keeps what it does around it.
"""

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from allranks.errors import LayoutError, TaskError
from allranks.parallel.batch_statistics import normalise
from allranks.parallel.mesh import Mesh
from allranks.parallel.own_checkpoints import keep_contexts
from allranks.parallel.path import STATISTICS, Path
from allranks.parallel.running_statistics import ByRank, follow_first, gather_by_rank, mean_of_ranks
from allranks.verdict import Decision

Mode = Literal["sync", "local", "broadcast"]

# torch has no public name for the common base of BatchNorm1d, 2d, 3d and SyncBatchNorm.
BATCH_STATISTICS = nn.modules.batchnorm._BatchNorm
# A context variable, because a block that is recomputed in the backward runs in the context of its forward.
_COUNTS: ContextVar[bool] = ContextVar("counts", default=True)

RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def has_batch_statistics(modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module's training output depends on which samples share its batch."""
    return any(uses_batch_statistics(member) for module in modules.values() for member in module.modules())


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether it is a BatchNorm that looks at its batch.

    One that is frozen (in evaluation mode) uses its running statistics, unless it keeps none.
    """
    return isinstance(module, BATCH_STATISTICS) and (module.training or module.running_mean is None)


@final
class AnyBatchNorm(BATCH_STATISTICS):
    """BatchNorm for inputs of any number of dims: what torch's SyncBatchNorm is, but for how it synchronises."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dims (samples, channels, ...), got {input.dim()}")


@dataclass(eq=False)
class BatchNorms:
    """The BatchNorms of a spread model over several data-parallel ranks.

    Attributes:
        mode: what their statistics are taken over; None where there are none, or one data-parallel rank.
        group: the data-parallel ranks, and those that have other positions of the same samples; of local_sgd those of
            one copy, None where that is one rank.
        owners: logical name of a buffer -> the BatchNorm that owns it.
        path: notes which statistics are taken together; None where copies train by themselves, and may part.
    """

    mode: Mode | None = None
    group: dist.ProcessGroup | None = None
    owners: Mapping[str, nn.Module] = field(default_factory=dict)
    path: Path | None = None

    @property
    def counts(self) -> bool:
        """Whether this rank's rows are part of the statistics; False while a filler runs."""
        return _COUNTS.get()

    @property
    def synchronises(self) -> bool:
        """Whether a forward takes its statistics over the ranks of `group`."""
        return self.mode == "sync" and self.group is not None

    @property
    def alike(self) -> frozenset[str]:
        """Logical names of the buffers that a forward leaves alike on every rank, whatever samples each has seen."""
        return frozenset(self.owners if self.synchronises else ())

    def keep_only(self, names: Collection[str]) -> None:
        """Forget the buffers that this rank does not hold: other stages of a pipeline do."""
        self.owners = {name: owner for name, owner in self.owners.items() if name in names}

    def by_rank(self) -> ByRank:
        """Name of a running statistic -> what each data-parallel rank has learnt; {} unless local; collective then."""
        if self.mode != "local" or self.group is None:
            return {}
        return gather_by_rank(self._running(), self.group)

    def average(self) -> None:
        """Where each rank has learnt its own running statistics, put their mean in their place; collective then."""
        running = self._running()
        for name, ranks in self.by_rank().items():
            running[name].copy_(mean_of_ranks(ranks))

    def follow_first(self) -> None:
        """Under broadcast, take the running statistics of the first data-parallel rank; collective then."""
        if self.mode == "broadcast" and self.group is not None:
            follow_first(self._running(), self.group)

    def _running(self) -> dict[str, torch.Tensor]:
        return {name: owner.get_buffer(name.rpartition(".")[2]) for name, owner in self.owners.items()}

    @property
    def own_names(self) -> tuple[str, ...]:
        """Logical names of what each rank learns by itself."""
        return tuple(self._running()) if self.mode == "local" else ()

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Inside, whether this rank's rows are part of synchronised statistics."""
        before = _COUNTS.set(counts)
        try:
            yield
        finally:
            _COUNTS.reset(before)


def take_over(
    modules: Mapping[str, nn.Module], mesh: Mesh, hint: Mode | None, decisions: list[Decision], path: Path | None = None
) -> BatchNorms:
    """Let every BatchNorm of `modules` mean what the layout says, else the hint, else sync; said in `decisions`.

    Args:
        path: notes the statistics that all ranks take together.

    Raises:
        LayoutError: each rank is to take its own samples' statistics, and has some of their positions only.
    """
    named = [
        (name, member)
        for which, module in modules.items()
        for name, member in module.named_modules(prefix=which, remove_duplicate=False)
        if isinstance(member, BATCH_STATISTICS)
    ]
    members = {member: name for name, member in reversed(named)}  # each once, by its first name
    for member in members:
        if type(member) is nn.SyncBatchNorm:
            # torch's own synchronises over the whole world, and refuses the CPU, as DDP refuses it there.
            member.__class__ = AnyBatchNorm  # type: ignore[assignment]
    if mesh.sample_group is None or not members:
        return BatchNorms()
    mode: Mode = mesh.layout.batchnorm or hint or "sync"
    if mesh.layout.cp > 1 and mode != "sync":
        raise LayoutError(
            f"layout.batchnorm={mode} takes each rank's own samples, and cp={mesh.layout.cp} gives it some positions "
            "of them: use batchnorm=sync"
        )
    owners = {
        f"{name}.{leaf}" if name else leaf: member
        for name, member in named
        for leaf in RUNNING
        if member._buffers.get(leaf) is not None
    }
    # Copies of local_sgd are by themselves; what each rank has learnt is told to all, where it is told.
    norms = BatchNorms(mode, mesh.sample_group if mode == "local" else mesh.gradient_group, owners)
    norms.path = path if mesh.layout.local_sgd is None else None
    keep_contexts()
    # What FSDP2 gathers in a lower type is not of the statistics' own, and torch's kernels on the CPU want one.
    for member, name in members.items() if norms.synchronises or mesh.layout.fully_sharded else ():
        _take_over(member, name, norms)
    if any(map(uses_batch_statistics, members)):
        decisions.append(_describe(mode, len(members), mesh, hint))
    return norms


def _take_over(member: Any, name: str, norms: BatchNorms) -> None:
    """Let `member` compute in one type, and take its statistics over the ranks of `norms.group` where that is meant."""
    given: Callable[..., Any] | None = vars(member).get("forward")
    own_forward = given is not None or type(member).forward is not BATCH_STATISTICS.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Synchronised(norms, name) as seen:
            # Looked up in the class: a copy of the module (an average of the weights, say) computes with its own.
            output = type(self).forward(self, *args, **kwargs) if given is None else given(*args, **kwargs)
        if norms.synchronises and own_forward and not seen.called and uses_batch_statistics(self):
            raise TaskError(
                f"{name or 'the model'} is a {type(self).__name__}, a BatchNorm that computes its statistics itself: "
                "call torch.nn.functional.batch_norm in its forward, which allranks synchronises"
            )
        return output

    member.forward = types.MethodType(forward, member)


class _Synchronised(TorchFunctionMode):
    """Inside, `functional.batch_norm` in training takes its statistics over all ranks, where these are synchronised."""

    def __init__(self, norms: BatchNorms, name: str) -> None:
        super().__init__()
        self.called = False
        self._norms, self._name = norms, name

    def __torch_function__(
        self, function: Callable[..., Any], kinds: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is not functional.batch_norm:
            return function(*args, **(kwargs or {}))
        self.called = True
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        value: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        weight, bias = (_in_type_of(running_mean, part) for part in (weight, bias))
        tensors = value, running_mean, running_var, weight, bias
        if not training or not self._norms.synchronises:
            return functional.batch_norm(*tensors, training, momentum, eps)
        assert self._norms.group is not None
        how: dict[str, Any] = {"group": self._norms.group, "counts": self._norms.counts}
        if self._norms.path is not None:
            how["note"] = partial(self._norms.path.note, STATISTICS + (self._name or "the model"))
        return normalise(*tensors, momentum, eps, **how)


def _in_type_of(statistic: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    return part if statistic is None or part is None else part.to(statistic.dtype)


def _describe(mode: Mode, number: int, mesh: Mesh, hint: Mode | None) -> Decision:
    positions = f" and all positions, cut over cp={mesh.layout.cp}" if mesh.layout.cp > 1 else ""
    over = f"all {mesh.dp} data-parallel ranks{positions}"
    exactly = "the run computes what one device computes"
    if mesh.layout.local_sgd is not None:
        number = mesh.layout.gradient_ranks
        over = f"the {number} ranks of a copy{positions}" if number > 1 else "the samples of a copy"
        over += ", and the running ones become the copies' mean where these meet"
        exactly = "copies train by themselves"
    first = "rank 0's" if mesh.layout.local_sgd is None else "its copy's first, and then the copies' mean"
    what = {
        "sync": f"batch statistics are taken over {over}",
        "local": f"batch statistics are each of {mesh.dp} data-parallel ranks' own",
        "broadcast": f"batch statistics are each of {mesh.dp} data-parallel ranks' own, the running ones {first}",
    }[mode]
    source = "is asked for" if mesh.layout.batchnorm else "is what hints().batchnorm says" if hint else "is the default"
    means = {
        "sync": exactly,
        "local": "the run computes something else by design, and evaluates with the mean of the running statistics",
        "broadcast": "the run computes something else by design",
    }[mode]
    layers = f"{number} BatchNorm layer{'s' if number > 1 else ''}"
    return Decision(what, f"layout.batchnorm={mode} {source}: {means} ({layers})")


@contextmanager
def statistics_fixed(module: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm that keeps no running statistics looks at no batch in evaluation mode: mean 0, variance 1."""
    without = [m for m in module.modules() if isinstance(m, BATCH_STATISTICS) and m.running_mean is None]
    for member in without:
        like = _like(member, module)
        member.running_mean = torch.zeros(member.num_features, dtype=like[0], device=like[1])
        member.running_var = torch.ones(member.num_features, dtype=like[0], device=like[1])
    try:
        yield
    finally:
        for member in without:
            member.running_mean = member.running_var = None


def _like(member: nn.Module, module: nn.Module) -> tuple[torch.dtype | None, torch.device | None]:
    """Type and device of what `member` computes with: its own, or those of what stands before it, or behind.

    What another stage of a pipeline holds is on meta, and so is a `member` that this rank never calls.
    """
    near: tuple[torch.dtype | None, torch.device | None] = (None, None)
    passed = False
    for part in module.modules():
        own = [(p.dtype, p.device) for p in part.parameters(recurse=False) if p.is_floating_point()]
        if part is member and own:
            return own[0]
        near = next((like for like in own if like[1].type != "meta"), near)
        passed = passed or part is member
        if passed and near[0] is not None:
            break
    return near
