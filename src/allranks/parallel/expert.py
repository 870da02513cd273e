"""The ep axis: experts that are cut over data-parallel ranks, and tokens that travel to them and back.

What a module of experts is (docs/how-to/experts.md): it has a whole number `num_experts`, parameters of its own with
`num_experts` rows in their first dim, and `forward(tokens, tokens_per_expert)`, which computes rows that are sorted by
expert with as many experts as its parameters hold. Under ep each rank's parameters hold some of them; around the
module's own forward the rows are exchanged. The router, whatever it is, notices nothing.

A cut parameter is a plain tensor of this rank's experts, as under tp. DDP leaves it alone: its gradient holds the
tokens of the whole ep group already, and is added up over those ranks only that hold the same experts. Where the layout
is fully sharded FSDP2 shards it over these, each module of experts as a unit of its own (`shard`).
"""

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import LayoutError
from allranks.parallel.average import take_back, tell_gradients
from allranks.parallel.expert_ops import exchange, exchange_counts, order_by_expert
from allranks.parallel.mesh import Mesh
from allranks.parallel.optional import depend_on
from allranks.parallel.path import EXPERTS, Path
from allranks.parallel.tensor import Cut
from allranks.verdict import Decision

FORWARD = ["tokens", "tokens_per_expert"]


def is_experts(module: nn.Module) -> bool:
    """Whether it has `num_experts`, parameters of its own, and `forward(tokens, tokens_per_expert)`."""
    if not isinstance(getattr(module, "num_experts", None), int) or not any(True for _ in _own(module)):
        return False
    return list(inspect.signature(type(module).forward).parameters)[1:] == FORWARD


@final
class ExpertCutter:
    """Cuts the experts of a model as they are placed, and lets their modules exchange tokens.

    Attributes:
        members: the modules of experts, by logical name, each once.
        sharded: whether each becomes a unit of FSDP2, over the ranks that hold the same experts.

    Raises:
        LayoutError: there are none, their number does not divide, or a parameter is not stacked or is shared.
    """

    def __init__(self, modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
        self._mesh = mesh
        named = [
            (name, member)
            for which, module in modules.items()
            for name, member in module.named_modules(prefix=which, remove_duplicate=False)
        ]
        self._names = [(name, member) for name, member in named if is_experts(member)]
        first = {id(member): (name, member) for name, member in reversed(self._names)}
        self.members: dict[str, Any] = dict(sorted(first.values(), key=self._names.index))
        self._check(named)
        self._cut = {id(p): p for member in self.members.values() for _, p in _own(member)}
        # A model that is nothing but experts is a unit already.
        alone = any(member is module for member in self.members.values() for module in modules.values())
        self.sharded = mesh.expert_mesh is not None and not alone

    def __call__(self, parameter: nn.Parameter, whole: nn.Parameter) -> nn.Parameter:
        """This rank's experts of `whole`, the placed value of `parameter`; itself where it is not cut."""
        if id(parameter) not in self._cut:
            return whole
        start, end = self._bounds(len(whole))
        return nn.Parameter(whole.detach()[start:end].clone(), requires_grad=whole.requires_grad)

    def find_cuts(self) -> dict[str, Cut]:
        """Logical name of a parameter -> how it will be cut; asked before placing replaces the parameters."""
        return {
            f"{prefix}.{name}" if prefix else name: Cut("ep", 0, self._bounds(len(p))[0], tuple(p.shape))
            for prefix, member in self._names
            for name, p in _own(member)
        }

    def install(self, modules: Mapping[str, nn.Module], path: Path) -> Decision:
        """Let every module of experts exchange tokens, and DDP leave its parameters alone; said in words.

        Args:
            path: notes what all ranks exchange together; groups of a few may each go their own way.
        """
        together = self._mesh.twin_group is None and self._mesh.layout.local_sgd is None
        for name, member in self.members.items():
            note = partial(path.note, EXPERTS + (name or "of the model")) if together else lambda: None
            _exchange_around(member, self._mesh.group("ep"), note, sharded=self.sharded)
        for module in modules.values():
            # torch has no public way to say it to DDP.
            names = [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in self._cut]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        ep = self._mesh.layout.ep
        sizes = sorted({member.num_experts for member in self.members.values()})
        each = " or ".join(str(size // ep) for size in sizes)
        some = ", ".join(list(self.members)[:3]) + " ..." * (len(self.members) > 3)
        what = f"each of ep={ep} ranks holds {each} of {' or '.join(map(str, sizes))} experts a layer"
        if self.sharded:
            what += f", sharded over the {self._mesh.layout.expert_shards} ranks that hold the same ones"
        return Decision(what, f"these modules compute tokens sorted by expert: {some}")

    def _bounds(self, num_experts: int) -> tuple[int, int]:
        share = num_experts // self._mesh.layout.ep
        first = self._mesh.coordinate("ep") * share
        return first, first + share

    def _check(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        ep = self._mesh.layout.ep
        if not self.members:
            raise LayoutError(
                f"ep={ep} cuts experts over ranks, and model() has none: no module has num_experts, parameters stacked "
                f"by expert and forward({', '.join(FORWARD)}); leave ep out, or see docs/how-to/experts.md"
            )
        for name, member in self.members.items():
            number = member.num_experts
            if number % ep:
                fits = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
                raise LayoutError(f"{name} has num_experts={number}, which ep({ep}) does not divide; ep can be {fits}")
            below = [f"{name}.{leaf}" for leaf, _ in member.named_buffers()]
            below += [f"{name}.{leaf}" for leaf, p in member.named_parameters() if not p.dim() or len(p) != number]
            below += [f"{name}.{leaf}" for leaf, _ in member.named_parameters() if "." in leaf]
            if below:
                raise LayoutError(
                    f"ep={ep}: {below[0]} is no parameter stacked by expert: every parameter of {name} has to be its "
                    f"own, with num_experts={number} rows in its first dim, and it keeps no buffers"
                )
        stacked = {id(p): name for name, member in self.members.items() for _, p in _own(member)}
        for name, member in named:
            shared = [leaf for leaf, p in _own(member) if id(p) in stacked and not is_experts(member)]
            if shared:
                where = ".".join(filter(None, (name, shared[0])))
                raise LayoutError(f"ep={ep}: {where} is shared with experts, which are cut: untie them")


@final
class ExpertGradients:
    """What DDP and FSDP2 do for other parameters: the gradients of cut experts, as the mean that theirs are.

    Args:
        members: the modules of experts.
        sharded: whether FSDP2 shards them, and makes that mean itself.

    Attributes:
        sharded: those of them that it shards.
    """

    def __init__(self, members: Sequence[nn.Module], mesh: Mesh, *, sharded: bool = False) -> None:
        self._members = list(members)
        self.sharded = self._members if sharded else []
        self._whole = [] if sharded else self._members
        self._mesh = mesh

    @property
    def parameters(self) -> dict[int, nn.Parameter]:
        """Those of them that this rank trains and reduces here, by id; other stages' have no memory here."""
        owned = (p for member in self._whole for _, p in _own(member))
        return {id(p): p for p in owned if p.requires_grad and not p.is_meta}

    def reduce(self, among: Collection[int] | None = None) -> None:
        """After a step's last backward; collective.

        A rank's gradient is the sum over the samples of its ep group. Those of the other groups are added, and the
        whole is divided by the number of ranks that DDP and FSDP2 divide by (law 3). On one device there is a gradient
        where some token has reached any expert: the ranks of an ep group, too, have to tell each other.

        Args:
            among: ids of the parameters that are meant, of which some rank has each, alike on all ranks; None: all.
        """
        meant = [p for key, p in self.parameters.items() if among is None or key in among]
        missing = [parameter.grad is None for parameter in meant]
        asks = among is None and bool(meant)
        flags = tell_gradients(missing, meant[0]) if asks else torch.empty(0)
        works = [dist.all_reduce(flags, group=self._mesh.gradient_group, async_op=True)] if asks else []
        for parameter in meant:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= self._mesh.layout.gradient_ranks
            if self._mesh.twin_group is not None:
                works.append(dist.all_reduce(parameter.grad, group=self._mesh.twin_group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        if asks:
            take_back(meant, missing, flags)

    def mean(self, value: float, device: torch.device) -> float:
        """The mean over the ep group of what each rank has counted of its own experts; collective there."""
        if not self._members:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self._mesh.group("ep"))
        return float(total) / self._mesh.layout.ep


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in module._parameters.items() if p is not None)


def count_rows(tokens: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> tuple[list[int], list[int]]:
    """(how many of the rows `tokens` go to each rank, how many come from it), on the host.

    Args:
        mine, theirs: [ranks, experts of one rank], the rows that this rank has for each, and that each has for this.
    """
    return mine.sum(1).tolist(), theirs.sum(1).tolist()


def _exchange_around(
    module: nn.Module, group: dist.ProcessGroup, note: Callable[[], object] = lambda: None, *, sharded: bool = False
) -> None:
    """Let `module.forward`, which computes this rank's experts, be given the tokens of all of the group's ranks.

    `note` is called before each exchange. A rank may have been given no token, and what its experts return for none
    may depend on nothing (`torch.zeros`): its backward goes back through both exchanges all the same, since the others
    wait there. Ranks over which experts are `sharded` reduce their gradients together: its are zeros then.
    """
    compute: Callable[..., torch.Tensor] = module.forward
    # Where tokens need no gradients, but parameters do, the second exchange alone has a backward. Made here: compiled
    # code makes none that needs a gradient.
    trained = torch.zeros((), requires_grad=True)

    def forward(self: nn.Module, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        note()
        theirs = exchange_counts(tokens_per_expert, group)
        # Dropless experts get as many rows as they get: the host has to know how many, and waits for the device.
        sent, received = count_rows(tokens, tokens_per_expert.view(len(theirs), -1), theirs)
        rows = exchange(tokens, group, sent, received)
        order = order_by_expert(theirs, len(rows))
        computed = compute(rows[order], theirs.sum(0))
        if sharded and not len(rows) and torch.is_grad_enabled():
            computed = depend_on(computed, [p for _, p in _own(self) if p.requires_grad])
        reaches = [] if rows.requires_grad or not any(p.requires_grad for _, p in _own(self)) else [trained]
        return exchange(computed[order.argsort()], group, received, sent, [rows, *reaches])

    module.forward = types.MethodType(forward, module)
