"""Whether an optimizer treats every element by itself, tried out on small tensors before it updates any of the model.

Where a process holds a part of a matrix (tp, ep, sharding=optimizer), an optimizer that looks at whole matrices (Muon,
arXiv 2502.16982; LAMB, arXiv 1904.00962; Adafactor, arXiv 1804.04235) computes something else on each part, and no
shape tells: its state may have the part's own. One that looks at all parameters together (Prodigy, arXiv 2306.06101)
does so as well where a process has only some of them. FSDP2's parameters know that they are parts, and are not asked.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from allranks.data.random_keys import generators_kept
from allranks.errors import TaskError
from allranks.layout import Layout
from allranks.parallel.compiled import uncompiled
from allranks.parameter_map import Entry
from allranks.stepping.optimizer_state import leaves_of
from allranks.verdict import Decision

Scope = Literal["element", "tensor", "model"]
"""What an update of one element looks at: that element, its whole parameter, or other parameters, too."""

ORDER: tuple[Scope, ...] = ("element", "tensor", "model")

KNOWN = frozenset((ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop))
"""Torch's own that are defined element by element; they are not tried."""

_ALIKE = 1e-3
"""Of the largest update: kernels for other shapes round otherwise, and Muon's parts differ by a half."""

_SEVERAL = (list, tuple, set, frozenset, deque)

_STEPS = 2  # the first step of many is the sign of the gradient


def check_scopes(
    optimizers: Mapping[str, Optimizer], entries: Mapping[int, Entry], layout: Layout
) -> tuple[Decision, ...]:
    """Refuse what would compute something else on the parts that this process has; say where that cannot be told.

    What looks at whole matrices (Muon) may do so in a group whose parameters are whole, beside a group of parts.

    Args:
        entries: id of a parameter -> who it is.

    Raises:
        TaskError: an optimizer looks at whole matrices of which processes have parts, or at parameters elsewhere.
    """
    decisions = []
    for which, optimizer in optimizers.items():
        cuts = [_find_part(group["params"], entries) for group in optimizer.param_groups]
        if not any(cuts) and layout.pp == 1:
            continue
        scopes, unknown = find_scopes(optimizer)
        scope: Scope = max(scopes, key=ORDER.index, default="element")
        # Who looks at all parameters may look at those of other groups, which the trial of one does not show.
        looking = scopes if scope == "tensor" else [scope] * len(scopes)
        cut = next((cut for cut, its in zip(cuts, looking, strict=True) if cut and its != "element"), "")
        kind = f"{type(optimizer).__name__}{f' ({which})' * bool(which)}"
        if cut:
            looks = "whole matrices" if scope == "tensor" else "all parameters together"
            raise TaskError(
                f"{kind} looks at {looks} (tried on small ones), and layout {layout} leaves each process a part of "
                f"{cut}: use AdamW or SGD there, or a layout without tp, ep and sharding=optimizer"
            )
        if scope == "model":
            raise TaskError(
                f"{kind} looks at all parameters together (tried on small ones), and pp={layout.pp} leaves each "
                "process some of them: use AdamW or SGD, or a layout without pp"
            )
        if unknown:
            what = f"{kind} is taken to update each element by itself, as the layout needs"
            decisions.append(Decision(what, f"it could not be found out: {unknown}"))
    return tuple(decisions)


def _find_part(parameters: Sequence[torch.Tensor], entries: Mapping[int, Entry]) -> str:
    """The name of the first of `parameters` that is a part; empty where none is."""
    return next((entries[id(one)].name for one in parameters if _is_part(one, entries[id(one)])), "")


def _is_part(parameter: torch.Tensor, entry: Entry) -> bool:
    """Whether it is a part and does not know it: a DTensor does, of all but what was cut before it became one."""
    before = any(entry.placements.get(axis, "replicate") != "replicate" for axis in ("tp", "ep"))
    return before or (entry.sharded and not isinstance(parameter, DTensor))


def find_scope(optimizer: Optimizer) -> tuple[Scope, str]:
    """The most that an update of any group looks at, and why that is not known for certain ("": it is)."""
    scopes, unknown = find_scopes(optimizer)
    return max(scopes, key=ORDER.index, default="element"), unknown


def find_scopes(optimizer: Optimizer) -> tuple[list[Scope], str]:
    """What an update of each group looks at ("element" where nobody knows), and why one is not known ("": all are).

    A copy of the optimizer with its settings, but without its state and hooks, updates a matrix and a neighbour: both
    together, the matrix alone, and its halves each as a process of its own would.
    """
    if type(optimizer) in KNOWN:
        return ["element"] * len(optimizer.param_groups), ""
    inner = _find_inner(optimizer)
    if inner:
        # A copy of a wrapper would hold the real one, and move the model.
        tried = [one for one in inner if not _find_inner(one)]
        worst: Scope = max((find_scope(one)[0] for one in tried), key=ORDER.index, default="element")
        return [worst] * len(optimizer.param_groups), "it steps another optimizer, and only that one was tried"
    stand_ins = _stand_in_for(tensor for group in optimizer.param_groups for tensor in group["params"])
    found = [_find_by_trial(optimizer, group, stand_ins) for group in optimizer.param_groups]
    unknown = dict.fromkeys(because for _, because in found if because)
    return [scope for scope, _ in found], "; ".join(unknown)


def _find_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that it holds, in attributes, groups and what contains others; and those that they hold."""
    found: dict[int, Optimizer] = {}
    seen = {id(optimizer)}
    waiting: list[Any] = list(vars(optimizer).values())
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found[id(value)] = value
            waiting += vars(value).values()
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, _SEVERAL):
            waiting += value
    return list(found.values())


def _find_by_trial(
    optimizer: Optimizer, group: dict[str, Any], stand_ins: Mapping[int, torch.Tensor]
) -> tuple[Scope, str]:
    """Of one group: one that cannot be tried says nothing of the next one."""
    if not group["params"]:
        return "element", ""
    try:
        # A compiled update would be compiled for three shapes that no step has, and by a compiler of C++.
        with unset_fake_temporarily(), generators_kept(), uncompiled():
            found = _try(optimizer, group, stand_ins)
    except Exception as error:
        # Whatever the user's optimizer raised: it may want a closure, or a shape that no small tensor has.
        found = f"trying it on small tensors raised {type(error).__name__}: {error}"
    return (found, "") if found in ORDER else ("element", found)


def _try(optimizer: Optimizer, group: dict[str, Any], stand_ins: Mapping[int, torch.Tensor]) -> Scope | str:
    """The scope under the settings of one group, or why there is none."""
    generator = torch.Generator("cpu").manual_seed(0)
    # On the processor, whatever device the model is on, and not in half precision, where updates round to nothing.
    dtype = torch.float64 if group["params"][0].dtype is torch.float64 else torch.float32
    matrix, other = torch.randn(2, _STEPS + 1, 8, 6, generator=generator, dtype=dtype, device="cpu")

    def update(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return _update(lambda parameters: _copy(optimizer, group, parameters, stand_ins), tensors)

    whole = update(matrix, other)[0]
    if not whole.any():
        return "it did not move small tensors"
    if _differ(whole, update(matrix, other)[0]):
        return "it draws random numbers, so that two equal updates differ"
    if _differ(whole, update(matrix)[0]):
        return "model"
    for dim in (1, 2):
        parts = torch.cat([update(part)[0] for part in matrix.chunk(2, dim)], dim - 1)
        if _differ(whole, parts):
            return "tensor"
    return "element"


def _update(make: Callable[[Sequence[torch.Tensor]], Optimizer], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """By how much a fresh optimizer moves parameters, each with its values and then its gradients."""
    parameters = [nn.Parameter(one[0].clone()) for one in tensors]
    twin = make(parameters)
    for step in range(1, _STEPS + 1):
        for parameter, one in zip(parameters, tensors, strict=True):
            parameter.grad = one[step].clone()
        type(twin).step(twin)  # the class's: a scheduler binds the instance's to the real one
    return [parameter.detach() - one[0] for parameter, one in zip(parameters, tensors, strict=True)]


def _stand_in_for(parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """By id. Nothing is to move the model's own, which an optimizer may hold in attributes, nor to copy them all."""
    return {id(one): nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), False) for one in parameters}


def _copy(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[torch.Tensor],
    stand_ins: Mapping[int, torch.Tensor],
) -> Optimizer:
    # Not copy.copy: Optimizer's own way of pickling leaves out what its subclasses hold.
    twin = object.__new__(type(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [{"params": list(parameters)}]
    known = {
        **stand_ins,
        id(optimizer.state): twin.state,
        id(optimizer.param_groups): twin.param_groups,
        id(group): twin.param_groups[0],
    }
    settings = {key: _own(value, known) for key, value in group.items() if key != "params"}
    twin.param_groups[0] |= _on_processor(settings)
    for name, value in vars(optimizer).items():
        hooks = name.startswith("_optimizer_") and isinstance(value, OrderedDict)
        setattr(twin, name, OrderedDict() if hooks else _own(value, known))
    return twin


def _own(value: Any, known: dict[int, Any]) -> Any:
    """A copy that shares no tensor and no container with what it is of; `known`: id of what was copied -> its copy."""
    if id(value) in known:
        return known[id(value)]
    copied: Any
    if isinstance(value, torch.Tensor):
        tensor = value.detach() if value.is_meta else value.detach().cpu()
        copied = nn.Parameter(tensor.clone(), value.requires_grad) if type(value) is nn.Parameter else tensor.clone()
    elif isinstance(value, tuple | frozenset):
        parts = [_own(part, known) for part in value]
        copied = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    else:
        copied = copy(value)
    known[id(value)] = copied  # before its parts, which may hold it
    if isinstance(value, dict):
        copied.clear()
        copied.update((_own(key, known), _own(part, known)) for key, part in value.items())
    elif isinstance(value, list | deque):
        copied.clear()
        copied.extend(_own(part, known) for part in value)
    elif isinstance(value, set):
        copied.clear()
        copied.update(_own(part, known) for part in value)
    return copied


def _on_processor(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without what only a GPU does, and with a learning rate: a schedule may begin at none."""
    kept = settings | {key: False for key in ("fused", "capturable") if settings.get(key)}
    return kept | ({"lr": 1.0} if "lr" in kept and not float(kept["lr"]) else {})


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    # `not <=`, so that what is not finite differs.
    return not bool((one - other).abs().max() <= _ALIKE * one.abs().max())


def check_state(optimizer: Optimizer, entries: Mapping[int, Entry]) -> None:
    """State of a part of a parameter is of that part, element by element, or it means something else on each rank.

    Raises:
        TaskError: an optimizer that could not be tried keeps rows, columns or other sums of what is cut.
    """
    for parameter, state in optimizer.state.items():
        entry = entries[id(parameter)]
        if not entry.sharded or isinstance(parameter, DTensor):
            continue
        for key, value in leaves_of(state):
            if isinstance(value, torch.Tensor) and value.numel() > 1 and tuple(value.shape) != entry.box.shape:
                raise TaskError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for a part "
                    f"{list(entry.box.shape)} of {entry.name}: it looks at whole tensors, which tp, ep and "
                    "sharding=optimizer cut; use AdamW or SGD, or another layout"
                )
