"""Where a model is cut into the stages of a pipeline, and which of its modules belong to which stage.

A stage begins where one of the model's blocks is called. What is registered before the first block (an embedding)
belongs to the first stage, what is registered after the last one (a head) to the last stage: modules are registered in
the order of their use. Where that is not so, the pipeline notices at its first forward.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from allranks.errors import LayoutError, TaskError
from allranks.even_cut import cut_among
from allranks.parallel.blocks import find_blocks, nearest_to

Count = Callable[[nn.Module, Sequence[str]], list[float]]
"""(module, names) -> operations before the first of these is called, and from each one's call until the next one's.

TaskError where they cannot be counted. All ranks come to the same."""

_SHOWN = 6


@dataclass(frozen=True)
class StagePlan:
    """The stages of one module.

    Attributes:
        points: stage i + 1 begins where the module of this name, points[i], is called.
        homes: name of a module that lies in one stage whole, the largest such -> its stage. What is in none of them
            (parameters of the model itself) belongs to every stage.
        because: where the cuts come from.
        balanced: by what their pieces were weighed.
    """

    points: tuple[str, ...]
    homes: Mapping[str, int]
    because: str
    balanced: str

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.points) + 1


def plan_stages(
    module: nn.Module,
    ranks: Sequence[int],
    blocks: Sequence[str] = (),
    split_before: Sequence[str] = (),
    count: Count | None = None,
) -> StagePlan:
    """Cut `module` into a stage for each of `ranks`, what a rank has in all as equal in cost as its blocks allow.

    The cost of a piece is the number of its operations, or, where nobody has counted them, of its parameters,
    embeddings aside, which are looked up and not multiplied.

    Args:
        ranks: along pp, of each stage.
        blocks: `hints().blocks`, which replace the search for repeated modules.
        split_before: `hints().split_before`, which replaces both: modules before which a stage may begin.
        count: None where there is no sample to count operations on.

    Raises:
        LayoutError: there are fewer blocks than stages, none at all, or a pattern matches nothing.
    """
    num_stages = len(ranks)
    needed = num_stages - 1 if split_before else num_stages
    names, because = _candidates(module, blocks, split_before, needed)
    if len(names) < needed:
        found = f"{', '.join(names[:_SHOWN])}{' ...' * (len(names) > _SHOWN)}" or "none repeats"
        raise LayoutError(
            f"a pipeline of {num_stages} stages begins at {needed} blocks at least, and this model has {len(names)} "
            f"({found}): use fewer stages, or name the modules before which it may be cut in hints().split_before"
        )
    costs, balanced = _weigh(module, names, count)
    if not split_before:
        # What lies before the first block makes no stage of its own.
        costs[:2], names = [costs[0] + costs[1]], names[1:]
    starts = cut_among(costs, ranks)
    points = tuple(names[start - 1] for start in starts[1:])
    return StagePlan(points, _assign(module, points), because, balanced)


def _candidates(
    module: nn.Module, blocks: Sequence[str], split_before: Sequence[str], needed: int
) -> tuple[list[str], str]:
    if split_before:
        return _match(module, split_before), "hints().split_before names them"
    found = find_blocks({"": module}, blocks)[""]
    if not blocks and len(found) < needed and isinstance(module, nn.Sequential):
        parts = [name for name, part in module.named_children() if any(True for _ in part.parameters())]
        return parts, "the model is a sequence of modules"
    return found, "hints().blocks names them" if blocks else "these modules repeat"


def _match(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The outermost modules that each pattern matches ("layers.*" means the layers, not their parts), in order."""
    # A list of modules is never called.
    named = [name for name, member in module.named_modules() if name and type(member).forward is not nn.Module.forward]
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in named if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise LayoutError(f"hints().split_before: {pattern!r} matches no module; {nearest_to(pattern, named)}")
        chosen |= {name for name in found if not any(name.startswith(f"{other}.") for other in found)}
    return [name for name in named if name in chosen]


def _weigh(module: nn.Module, names: Sequence[str], count: Count | None) -> tuple[list[float], str]:
    """What lies before the first of `names`, and from each to the next; and by what that was weighed."""
    uncounted = "no sample was at hand"
    try:
        if count is not None:
            return count(module, names), "balanced by operations"
    except TaskError as error:
        uncounted = str(error)
    costs = [0.0] * (len(names) + 1)
    for name, segment in _assign(module, names).items():
        costs[segment] += _cost(module.get_submodule(name))
    return costs, f"balanced by parameters, as operations could not be counted: {uncounted}"


def _assign(module: nn.Module, points: Sequence[str]) -> dict[str, int]:
    """Name -> index of the last of `points` (from 1; 0 before the first) that is registered before it, or is it."""
    found: dict[str, int] = {}
    passed = 0

    def visit(parent: nn.Module, prefix: str) -> None:
        nonlocal passed
        # Not named_children(): a module that is registered twice is used twice, and none is left out here.
        for leaf, child in parent._modules.items():
            name = f"{prefix}{leaf}"
            if child is None:
                continue
            if any(point.startswith(f"{name}.") for point in points):
                visit(child, f"{name}.")
            else:
                passed += name in points
                found[name] = passed

    visit(module, "")
    return found


def _cost(module: nn.Module) -> float:
    looked_up = sum(
        member.weight.numel() for member in module.modules() if isinstance(member, nn.Embedding | nn.EmbeddingBag)
    )
    return float(sum(parameter.numel() for parameter in module.parameters()) - looked_up)
