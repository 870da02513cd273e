"""Which module goes to which device of a process: as the rules of `[layout.placement]` say, or balanced by bytes."""

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.even_cut import cut_evenly
from allranks.parallel.blocks import CONTAINERS, find_blocks
from allranks.parallel.mesh import Mesh
from allranks.parallel.placement import Placement, named_tensors
from allranks.parallel.share import Place, Share, share_of
from allranks.units import format_bytes
from allranks.verdict import Decision

SHOWN = 3

Modules = Mapping[str, nn.Module]
Rules = Sequence[tuple[str, str]]


def begin_placement(
    modules: Modules, mesh: Mesh, device: torch.device, blocks: Sequence[str], decisions: list[Decision]
) -> Placement:
    """The Placement that the layout means, before any tensor has its place; in words to `decisions`.

    Args:
        device: where this process would compute without placement.
        blocks: `hints().blocks`.

    Raises:
        LayoutError: a rule matches nothing, or names a device that is not there; two rules differ over one parameter,
            or over one that several modules share; DDP would go over devices of several types; compiled blocks would
            lie on several devices.
    """
    layout = mesh.layout
    share = mesh.share or share_of(layout, () if device.type == "cpu" else (device,))
    rules = layout.placement
    places = plan_by_rules(modules, rules, share) if rules else plan_balanced(modules, blocks, share)
    types = sorted({place.device.type for place in places.values()})
    if layout.dp_replicate > 1 and len(types) > 1:
        raise LayoutError(
            f"dp_replicate={layout.dp_replicate} keeps copies equal by DDP, which takes devices of one type, and "
            f"[layout.placement] names {' and '.join(types)}: name GPUs only, or leave dp_replicate out"
        )
    placement = Placement(modules, share, places)
    for which, names in find_blocks(modules, blocks).items() if layout.compile != "none" else ():
        split = [name for name in names if placement.is_split(f"{which}.{name}" if which else name)]
        if split:
            raise LayoutError(
                f"compile={layout.compile} compiles a block for one device, and [layout.placement] puts {split[0]} on "
                "several: give each block one device, or leave compile out"
            )
    decisions += describe_placement(placement, rules)
    return placement


def plan_by_rules(modules: Modules, rules: Rules, share: Share) -> dict[str, Place]:
    """Logical name of each parameter and buffer -> its device. Raises LayoutError as `begin_placement` says.

    A rule holds for what it names and for everything below. What no rule names lies on the first device; a buffer that
    none names lies where the parameters of its module do.
    """
    tensors = dict(named_tensors(modules))
    ruled: dict[str, tuple[str, Place]] = {}
    for pattern, device in rules:
        place = share.find(device)
        found = [name for name in tensors if _matches(name, pattern)]
        if not found:
            raise LayoutError(_explain_unmatched(pattern, modules, tensors))
        for name in found:
            other, there = ruled.setdefault(name, (pattern, place))
            if there != place:
                raise LayoutError(
                    f"[layout.placement]: {other!r} = {there.name} and {pattern!r} = {place.name} both name {name}: "
                    "let one of them name it"
                )
    return _follow_shared(tensors, {name: place for name, (_, place) in ruled.items()}, share)


def plan_balanced(modules: Modules, blocks: Sequence[str], share: Share) -> dict[str, Place]:
    """The same without rules: the model's parts, in its order, cut so that the fullest device holds the least."""
    tensors = dict(named_tensors(modules))
    owner: dict[int, int] = {}
    parts = [names for names in _parts(modules, find_blocks(modules, blocks)) if names]
    costs = [0.0] * len(parts)
    for index, names in enumerate(parts):
        for name in names:
            if id(tensors[name]) not in owner:
                owner[id(tensors[name])] = index
                costs[index] += tensors[name].nbytes
    counted = [index for index, cost in enumerate(costs) if cost]
    num_devices = min(len(share.used), len(counted))
    starts = cut_evenly([costs[index] for index in counted], num_devices) if counted else []
    place_of = dict.fromkeys(range(len(parts)), share.first)
    for place, start in zip(share.used, starts, strict=False):
        place_of.update(dict.fromkeys(counted[start:], place))
    return {name: place_of[owner[id(tensor)]] for name, tensor in tensors.items()}


def describe_placement(placement: Placement, rules: Rules) -> list[Decision]:
    """What lies where, where batch and loss are, and whether any of it matters on this machine."""
    share, held = placement.share, placement.num_bytes
    lies = {place: f"{place} holds {format_bytes(held[place])} ({_name_modules(placement, place)})" for place in held}
    if rules:
        found = [Decision(text, _name_rules(place, rules, share)) for place, text in lies.items()]
    else:
        why = "the model's parts are cut in their order so that the fullest device holds the fewest bytes"
        found = [Decision(", ".join(lies.values()), why)]
    what = f"loss() gets output and batch on {share.home}"
    found.append(Decision(what, "that is the last device in use, where the output mostly is already"))
    if len({place.device for place in held}) == 1:
        found.append(Decision("placement changes nothing here", _name_one_memory(next(iter(held)))))
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern names a tensor, or a module around it."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:end]), pattern) for end in range(len(parts), 0, -1))


def _explain_unmatched(pattern: str, modules: Modules, tensors: Mapping[str, torch.Tensor]) -> str:
    named = [name for name in _module_names(modules) if any(tensor.startswith(f"{name}.") for tensor in tensors)]
    known = [*named, *tensors]
    near = difflib.get_close_matches(pattern.rstrip(".*"), known, n=3, cutoff=0.4)
    advice = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(known[:8])} ..."
    return f"[layout.placement]: {pattern!r} matches no parameter or buffer, and no module that has some; {advice}"


def _module_names(modules: Modules) -> Iterator[str]:
    for which, module in modules.items():
        for name, _ in module.named_modules(prefix=which):
            if name:
                yield name


def _follow_shared(tensors: Mapping[str, torch.Tensor], ruled: Mapping[str, Place], share: Share) -> dict[str, Place]:
    """A tensor of several names goes where one of them is ruled to; the rest beside its module's parameters."""
    by_id: dict[int, tuple[str, Place]] = {}
    for name, place in ruled.items():
        other, there = by_id.setdefault(id(tensors[name]), (name, place))
        if there != place:
            raise LayoutError(
                f"[layout.placement] puts {other} on {there.name} and {name} on {place.name}, and these are one shared "
                "tensor: give both one device"
            )
    beside: dict[str, Place] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            place = by_id[id(tensor)][1] if id(tensor) in by_id else share.first
            beside.setdefault(name.rpartition(".")[0], place)
    found = {}
    for name, tensor in tensors.items():
        default = share.first if isinstance(tensor, nn.Parameter) else beside.get(name.rpartition(".")[0], share.first)
        found[name] = by_id[id(tensor)][1] if id(tensor) in by_id else default
    return found


def _parts(modules: Modules, blocks: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Names of the tensors of each part that stays together, in the model's order: a block, or a module without any."""
    for which, module in modules.items():
        yield from _parts_of(
            module, which, {f"{which}.{name}" if which else name for name in blocks[which]}, whole=False
        )


def _parts_of(module: nn.Module, name: str, blocks: set[str], *, whole: bool) -> Iterator[list[str]]:
    if whole:
        yield [tensor for tensor, _ in named_tensors({name: module})]
        return
    prefix = f"{name}." if name else ""
    own = (*module._parameters.items(), *module._buffers.items())
    yield [prefix + leaf for leaf, tensor in own if tensor is not None]
    # Not named_children(): what is registered twice has a name each time.
    for leaf, child in module._modules.items():
        if child is not None:
            inner = prefix + leaf
            opens = inner not in blocks and any(block.startswith(f"{inner}.") for block in blocks)
            lists = inner not in blocks and isinstance(child, CONTAINERS)
            yield from _parts_of(child, inner, blocks, whole=not (opens or lists))


def _name_rules(place: Place, rules: Rules, share: Share) -> str:
    said = [pattern for pattern, device in rules if share.find(device) == place]
    rest = "what no rule names lies on the first device"
    if not said:
        return rest
    words = f"[layout.placement] says so of {', '.join(said)}"
    return f"{words}; {rest}" if place == share.first else words


def _name_one_memory(place: Place) -> str:
    if place.device.type != "cpu":
        return f"all of the model lies on {place}"
    return "no GPU is in use: cpu:0, cpu:1 and so on are names for one memory, whose transfers are made and counted"


def _name_modules(placement: Placement, place: Place) -> str:
    """The outermost modules that lie there, and parameters of modules that lie on several."""
    named = [name or "the model" for name, (_, there) in placement.whole.items() if there == place]
    inside = tuple(f"{name}." for name in placement.whole if name)
    named += [
        name
        for name, there in placement.places.items()
        if there == place and "" not in placement.whole and not name.startswith(inside)
    ]
    some = ", ".join(named[:SHOWN])
    return some if len(named) <= SHOWN else f"{some} ... {named[-1]}"
