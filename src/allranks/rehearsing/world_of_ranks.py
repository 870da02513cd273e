"""Which ranks of a world are rehearsed: one of each kind, some, or all."""

from collections.abc import Iterator

from allranks.errors import ConfigError
from allranks.layout import Layout
from allranks.parallel.mesh import MESH_AXES

KINDS, ALL = "kinds", "all"


def choose_ranks(text: str, layout: Layout, *, of_a_user: bool = True) -> tuple[int, ...]:
    """The ranks that `--ranks` names.

    Args:
        text: "kinds" (the first and the last rank of the first, a middle and the last stage, and in the first and the
            last stage the neighbour of its first rank along each axis: within a stage ranks have to execute the same
            collectives), "all", or numbers with commas.
        of_a_user: whether model or loss are somebody's own code, in which any stage may depend on the rank. Of a model
            by name two ranks are compared in the first stage alone.

    Raises:
        ConfigError: no number, or a rank outside of the world.
    """
    size = layout.world_size
    if text == ALL:
        return tuple(range(size))
    if text == KINDS:
        each = size // layout.pp  # pp is the outermost axis
        ends = {0, layout.pp - 1}  # the first rank of all, and the stage that runs the loss
        stages = {*ends, layout.pp // 2}
        compared, looked_at = (stages, ends) if of_a_user else ({0}, set())
        lasts = {(stage + 1) * each - 1 for stage in compared}
        beside = {stage * each + stride for stage in looked_at for stride in _strides(layout)}
        return tuple(sorted({stage * each for stage in stages} | lasts | beside))
    found = []
    for word in text.split(","):
        if not word.strip().isdecimal():
            raise ConfigError(f"--ranks {text}: {word.strip()!r} is no rank; write kinds, all, or numbers as in 0,20")
        rank = int(word)
        if rank >= size:
            raise ConfigError(f"--ranks {text}: the world has {size} processes, whose ranks are 0 to {size - 1}")
        found.append(rank)
    return tuple(dict.fromkeys(found))


def _strides(layout: Layout) -> Iterator[int]:
    """How far off the neighbour of a stage's first rank is along each axis."""
    stride = 1
    for axis in reversed(MESH_AXES):
        degree = getattr(layout, axis)
        if axis != "pp" and degree > 1:
            yield stride
            stride *= degree
