"""The tp axis: layers whose parameters, and activations, are cut over ranks (tensor and sequence parallelism).

A cut parameter is a plain tensor of this rank's part; who it is says the ParameterMap. So DDP and FSDP2 go around it,
optimizers and checkpoints take it, and no operator is dispatched twice. Sources: Megatron-LM (arXiv 1909.08053,
2205.05198).
"""

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.hints import TensorStyle
from allranks.losses import ChunkedHead
from allranks.parallel.anew import made_before_forward
from allranks.parallel.tensor_attention import PACKED, attend_with_heads, leave_fused_path
from allranks.parallel.tensor_flow import CHANNELS, Flow
from allranks.parallel.tensor_ops import enter, part_bounds, split
from allranks.parallel.tensor_plan import TensorPlan
from allranks.parallel.tensor_vocabulary import embed_words, score_words
from allranks.verdict import Decision

_DIM: Mapping[tuple[TensorStyle, str], int] = {
    ("colwise", "weight"): 0,
    ("colwise", "bias"): 0,
    ("rowwise", "weight"): 1,
    ("vocab", "weight"): 0,
    ("vocab", "bias"): 0,
    ("heads", "in_proj_weight"): 0,
    ("heads", "in_proj_bias"): 0,
    ("heads", "q_proj_weight"): 0,
    ("heads", "k_proj_weight"): 0,
    ("heads", "v_proj_weight"): 0,
}
_IN_TURN = ("in_proj_weight", "in_proj_bias")  # of query, key and value, whose rows a rank keeps in turn


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter's part before anything else cuts it.

    Attributes:
        axis: the mesh axis over which it is cut.
        dim: along which dim.
        offset: where this rank's part begins.
        shape: of the whole.
        packed: of how many matrices along that dim the whole consists, whose rows count in turn (see `Box`).
    """

    axis: str
    dim: int
    offset: int
    shape: tuple[int, ...]
    packed: int = 1


@final
class TensorCutter:
    """Cuts the parameters of a plan as they are placed, and lets the modules compute with their parts.

    Args:
        plan: which modules, and how.
        group: the tp ranks.
    """

    def __init__(self, modules: Mapping[str, nn.Module], plan: TensorPlan, group: dist.ProcessGroup) -> None:
        self._plan = plan
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._named = {
            ".".join(filter(None, (which, name))): member
            for which, module in modules.items()
            for name, member in module.named_modules()
        }
        self._roots = list(modules.values())
        owners = {id(self._named[name]): style for name, style in plan.styles.items()}
        attention = [self._named[name] for name, style in plan.styles.items() if style == "heads"]
        self._projections = {id(member.get_submodule("out_proj")) for member in attention}
        owners |= dict.fromkeys(self._projections, "rowwise")
        self._packed = {id(p): PACKED for member in attention for n, p in member._parameters.items() if n in _IN_TURN}
        self._dims = {
            id(parameter): _DIM[style, name]
            for member in self._named.values()
            for name, parameter in member._parameters.items()
            if parameter is not None and (style := owners.get(id(member))) and (style, name) in _DIM
        }
        self._check_shared(owners)

    def __call__(self, parameter: nn.Parameter, whole: nn.Parameter) -> nn.Parameter:
        """This rank's part of `whole`, the placed value of `parameter`; itself where it is not cut."""
        dim = self._dims.get(id(parameter))
        if dim is None:
            return whole
        start, end, packed = self._bounds(parameter, dim)
        value = whole.detach()
        if packed > 1:
            value = value.unflatten(dim, (packed, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)
        part = value.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)
        return nn.Parameter(part, requires_grad=whole.requires_grad)

    def _bounds(self, parameter: nn.Parameter, dim: int) -> tuple[int, int, int]:
        """Where this rank's part begins and ends, and how many matrices' rows count in turn there."""
        packed = self._packed.get(id(parameter), 1)
        start, end = part_bounds(parameter.shape[dim] // packed, self._size, self._rank)
        return start * packed, end * packed, packed

    def find_cuts(self) -> dict[str, Cut]:
        """Logical name of a parameter -> how it will be cut; asked before placing replaces the parameters."""
        found = {}
        for prefix, member in self._named.items():
            for name, parameter in member._parameters.items():
                dim = None if parameter is None else self._dims.get(id(parameter))
                if parameter is not None and dim is not None:
                    start, _, packed = self._bounds(parameter, dim)
                    logical = f"{prefix}.{name}" if prefix else name
                    found[logical] = Cut("tp", dim, start, tuple(parameter.shape), packed)
        return found

    def describe_logits(self) -> list[Decision]:
        """Where the logits are not gathered for the loss, and why."""
        heads = {n: member for n in self._plan.styles if isinstance(member := self._named[n], nn.Linear)}
        heads = {name: member for name, member in heads.items() if self._plan.styles[name] == "vocab"}
        told = [name for name, member in heads.items() if isinstance(member, ChunkedHead)]
        because = "it is a ChunkedHead: where it is given the targets it returns losses"
        found = [Decision(f"{', '.join(told)} computes the loss with a part of the words", because)] if told else []
        if self._plan.loss_parallel:
            what = f"the logits of {', '.join(heads)} stay cut until the loss; metrics() gets whole ones"
            found.append(Decision(what, "hints().loss_parallel says so"))
        return found

    def install(self) -> None:
        """Let every module of the plan compute with its part."""
        flow = Flow(self._group, sequence=self._plan.sequence, loss_parallel=self._plan.loss_parallel)
        done = set(self._projections)  # attention computes with them in its own forward
        leave_fused_path(self._named, self._plan.styles.keys())
        for name, member in self._named.items():
            style = self._plan.styles.get(name)
            if style in ("sequence", "part"):
                for below in filter(_has_parameters, member.modules()):
                    _override(below, style, flow, done)
            elif style == "replicate" and not self._plan.sequence:
                done.update(map(id, member.modules()))  # it sees whole tensors: its own forward is right
            elif style is not None:
                _override(member, style, flow, done)
        for member in self._named.values() if not self._plan.sequence else ():
            if _has_parameters(member):
                _override(member, None, flow, done)
        for root in self._roots:
            root.register_forward_pre_hook(flow.begin)
            root.register_forward_hook(flow.end)

    def _check_shared(self, owners: Mapping[int, TensorStyle]) -> None:
        """A parameter of several modules has to be cut alike in all of them."""
        seen: dict[int, tuple[str, int | None]] = {}
        for prefix, member in self._named.items():
            for name, parameter in member._parameters.items():
                if parameter is None:
                    continue
                style = owners.get(id(member))
                dim = _DIM.get((style, name)) if style else None
                where, other = seen.setdefault(id(parameter), (prefix, dim))
                if other != dim:
                    raise LayoutError(f"{where} and {prefix} share a parameter, and tp would cut it in two ways")


def _override(module: nn.Module, style: TensorStyle | None, flow: Flow, done: set[int]) -> None:
    """Replace `module.forward` by that of its style, once; None: it is not cut, and sees whole or cut activations."""
    if id(module) in done:
        return
    done.add(id(module))
    forwards: dict[TensorStyle | None, Callable[..., Any]] = {
        "colwise": _colwise,
        "rowwise": _rowwise,
        "heads": _heads,
        "vocab": embed_words if isinstance(module, nn.Embedding) else score_words,
        "sequence": partial(_on_part, original=module.forward),
        "part": partial(_on_part, original=module.forward),
        "replicate": partial(_replicated, original=module.forward),
        None: partial(_unplanned, original=module.forward),
    }
    chosen = forwards[style]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return chosen(self, flow, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def _colwise(module: Any, flow: Flow, value: torch.Tensor) -> torch.Tensor:
    entered = flow.enter(value, cut=flow.meets_positions(module))
    if not flow.sequence:
        flow.regions.enter()
    return functional.linear(entered, module.weight, module.bias)


def _rowwise(module: Any, flow: Flow, value: torch.Tensor) -> torch.Tensor:
    if not flow.regions.inside and value.shape[CHANNELS] == module.in_features:
        value = split(value, flow.group, CHANNELS)  # a vocab layer before it has made it whole
    flow.forget()
    if not flow.sequence:
        flow.regions.exit()
    found = flow.leave(functional.linear(value, module.weight), opens=not flow.meets_positions(module))
    if module.bias is None:
        return found
    # On cut positions each rank has a partial sum of the bias's gradient.
    bias = enter(module.bias, flow.group) if flow.sequence else module.bias
    return found + bias.to(found.dtype)


def _heads(module: Any, flow: Flow, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    found, weights = attend_with_heads(module, flow, *args, **kwargs)
    return _rowwise(module.out_proj, flow, found), weights


def _on_part(module: nn.Module, flow: Flow, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    with _gradients_summed(module, flow.group):
        return original(*args, **kwargs)


def _replicated(module: nn.Module, flow: Flow, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    if flow.meets_positions(module):
        args, kwargs = pytree.tree_map_only(torch.Tensor, flow.whole_positions, (args, kwargs))
    output = original(*args, **kwargs)
    if not flow.meets_positions(module):
        flow.regions.enter()
    return pytree.tree_map_only(torch.Tensor, flow.cut_positions, output)


def _unplanned(module: nn.Module, flow: Flow, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Inside a cut region (a norm over a head's channels) each rank has a partial sum of its gradients."""
    if not flow.regions.inside:
        return original(*args, **kwargs)
    if reason := made_before_forward(module):
        raise LayoutError(
            f"tp: a {type(module).__name__} between a colwise and a rowwise layer {reason}, before its gradients can "
            "be summed over tp: build it without, or cut other layers with hints().tensor"
        )
    with _gradients_summed(module, flow.group):
        return original(*args, **kwargs)


@contextmanager
def _gradients_summed(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, the module's own parameters hand on gradients that are summed over `group`."""
    kept = dict(module._parameters)
    for name, parameter in kept.items():
        if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
            module._parameters[name] = enter(parameter, group)  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(kept)


def _has_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())
