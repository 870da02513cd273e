"""Which modules are gathered as one unit: repeated blocks, found by structure.

Transformers, residual networks and plain stacks all hold a list of modules that look alike. Those are the units that
FSDP gathers one at a time (torch's own advice: one `fully_shard` per block, then the root). Modules that share a
parameter must lie in one unit.
"""

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from allranks.errors import LayoutError
from allranks.verdict import Decision

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

Unit = tuple[str, ...]

_SHOWN = 3


def find_blocks(modules: Mapping[str, nn.Module], patterns: Sequence[str] = ()) -> dict[str, list[str]]:
    """For each module the names of what to gather one by one, in the model's order; empty where nothing repeats.

    Args:
        modules: the user's, by name ("" for a single one).
        patterns: `hints().blocks`, globs of logical names (with several modules "generator.layers.*"); they replace
            the search. Of matches that lie in one another the outermost counts ("layers.*" means the layers, not
            their parts).

    Raises:
        LayoutError: a pattern matches no module that is called and has parameters.
    """
    if patterns:
        return _match_blocks(modules, patterns)
    blocks: dict[str, list[str]] = {which: [] for which in modules}
    for which, module in modules.items():
        _visit(module, "", blocks[which])
    return blocks


def search_blocks(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, list[str]]:
    """The same of a layout that needs no blocks: where a pattern matches nothing, what repeats."""
    try:
        return find_blocks(modules, patterns)
    except LayoutError:
        return find_blocks(modules)


def group_units(module: nn.Module, blocks: Sequence[str]) -> list[Unit]:
    """The units of `blocks`: those that share a parameter become one.

    Returns tuples of module names, in order. What is in none of them belongs to the root, and so does a block that
    shares a parameter with it.
    """
    owners: dict[int, set[str]] = {}
    # A parameter without dims is never cut, so it binds nothing together.
    cut = [(name, p) for name, p in module.named_parameters(remove_duplicate=False) if p.dim()]
    for name, parameter in cut:
        block = next((b for b in blocks if _is_inside(name, b)), "")
        owners.setdefault(id(parameter), set()).add(block)
    group_of = {block: block for block in blocks} | {"": ""}

    def root_of(block: str) -> str:
        while group_of[block] != block:
            block = group_of[block]
        return block

    order = {block: index for index, block in enumerate(("", *blocks))}
    for sharing in owners.values():
        roots = sorted({root_of(block) for block in sharing}, key=order.__getitem__)
        for other in roots[1:]:
            group_of[other] = roots[0]
    members: dict[str, list[str]] = {}
    for block in blocks:
        members.setdefault(root_of(block), []).append(block)
    return [tuple(group) for head, group in members.items() if head != ""]


def describe_units(which: str, units: Sequence[Unit], hinted: bool) -> Decision:
    """What is gathered of a module one at a time, and because of what; `hinted`: `hints().blocks` names it."""
    model = f"model {which}" if which else "the model"
    why = "hints().blocks names them" if hinted else "these modules repeat"
    if not units:
        return Decision(f"{model} is gathered as one unit", "no block stands apart from the rest")
    some = ", ".join("+".join(unit) for unit in units[:_SHOWN]) + " ..." * (len(units) > _SHOWN)
    return Decision(f"{len(units)} units and the root of {model} are gathered one at a time", f"{why}: {some}")


def nearest_to(pattern: str, names: Iterable[str]) -> str:
    """What to say of a pattern that matches none of `names`."""
    near = difflib.get_close_matches(pattern, sorted(names), n=_SHOWN, cutoff=0.0)
    return f"the nearest are {', '.join(near)}" if near else "there are none"


def _match_blocks(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, list[str]]:
    # A list of modules is never called, and what has no parameter has nothing to gather.
    names = {
        which: [name for name, member in module.named_modules() if name and _is_unit(member)]
        for which, module in modules.items()
    }
    logical = {f"{which}.{name}" if which else name for which, some in names.items() for name in some}
    matched: set[str] = set()
    for pattern in patterns:
        found = {name for name in logical if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise LayoutError(
                f"hints().blocks: {pattern!r} matches no module with parameters; {nearest_to(pattern, logical)}"
            )
        matched |= found
    outermost = {name for name in matched if matched.isdisjoint(_around(name))}
    return {
        which: [name for name in some if (f"{which}.{name}" if which else name) in outermost]
        for which, some in names.items()
    }


def _is_inside(name: str, other: str) -> bool:
    return name.startswith(other + ".")


def _around(name: str) -> list[str]:
    """The names of the modules that the one of this name is in: `a`, `a.b` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _visit(module: nn.Module, prefix: str, found: list[str]) -> None:
    children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
    repeated: set[str] = set()
    if isinstance(module, CONTAINERS):
        shapes = Counter(_signature(child) for _, child in children)
        repeated = {name for name, child in children if shapes[_signature(child)] > 1 and _is_unit(child)}
    for name, child in children:
        if name in repeated:
            found.append(name)
        else:
            _visit(child, name, found)


def _is_unit(module: nn.Module) -> bool:
    """A module that is called (a list is not) and has something to gather."""
    called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return called and any(True for _ in module.parameters())


def _signature(module: nn.Module) -> tuple[object, ...]:
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(remove_duplicate=False))
    return (type(module).__qualname__, parameters)
