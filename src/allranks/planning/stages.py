"""Which blocks a stage holds in the program that is planned: the engine's own cut, or Megatron-LM's equal numbers."""

from functools import lru_cache

from allranks.even_cut import cut_among
from allranks.layout import THERE_AND_BACK
from allranks.model_profile import Block, ModelProfile
from allranks.planning.pipeline import stages_of
from allranks.planning.setting import Setting


def stages_under(profile: ModelProfile, setting: Setting) -> tuple[tuple[int, ...], ...]:
    """How many of each kind of block every rank of a pipeline holds, of all its stages together."""
    pp, chunks = setting.pp, setting.chunks
    if setting.mechanisms.stages == "blocks" or pp == 1 or profile.num_repeated < pp * chunks:
        return stages_of(profile, pp, chunks)
    counted = profile.source != "measured" and profile.flops > 0
    kinds = tuple((block.count, block.repeated, _cost(block, counted)) for block in profile.blocks)
    return _cut(kinds, pp, chunks, setting.schedule in THERE_AND_BACK)


@lru_cache(maxsize=1024)
def _cut(
    kinds: tuple[tuple[int, bool, float], ...], pp: int, chunks: int, there_and_back: bool
) -> tuple[tuple[int, ...], ...]:
    """As parallel/stage_plan.py: nothing but blocks begins a stage."""
    units: list[list[int]] = []  # of each block the kinds that begin with it, or, the first, that stand before it
    waiting: list[int] = []
    for kind, (count, repeated, _) in enumerate(kinds):
        if repeated:
            units += [[*waiting, kind], *([kind] for _ in range(count - 1))]
            waiting = []
        elif units:
            units[-1] += [kind] * count
        else:
            waiting += [kind] * count
    ranks = [2 * pp - 1 - s if there_and_back and s >= pp else s % pp for s in range(pp * chunks)]
    starts = cut_among([sum(kinds[kind][2] for kind in unit) for unit in units], ranks)
    held = [[0] * len(kinds) for _ in range(pp)]
    for rank, start, end in zip(ranks, starts, [*starts[1:], len(units)], strict=True):
        for unit in units[start:end]:
            for kind in unit:
                held[rank][kind] += 1
    return tuple(tuple(counts) for counts in held)


def _cost(block: Block, counted: bool) -> float:
    """Operations; of a model that cannot be traced parameters that are multiplied, whoever else has them."""
    if counted:
        return block.flops
    return sum(
        max(float(o.parameters), float(o.shape[1] * o.shape[2]) if o.kind == "matmul" and o.cut == "vocab" else 0.0)
        for o in block.operations
        if o.kind != "embedding"
    )
