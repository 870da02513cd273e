"""A pipeline: which blocks a stage holds, how many micro-steps are under way in it, and how long a step takes."""

from collections.abc import Sequence
from functools import lru_cache

from allranks.model_profile import ModelProfile

TWO_SIDED = ("zbv", "dualpipev")
FORWARDS_FIRST = ("gpipe", "looped_bfs")
"""All of a step, before its first backward."""
WAITING = 0.5
"""Of its activations, what a backward holds besides while its half of weights waits: the gradients of what its products
gave. Dry runs of llama3-8b and gpt2-xl over four ranks count 0.48 to 0.5."""
SPLIT = ("zb-1p", "zb-2p", "zbv", "interleaved_zb", "dualpipev")


@lru_cache(maxsize=4096)
def shared_out(
    counts: tuple[int, ...], repeated: tuple[bool, ...], pp: int, chunks: int
) -> tuple[tuple[int, ...], ...]:
    """How many of each kind of block every stage holds; what is not repeated stays at the ends.

    Where the repeated blocks do not divide, the ends hold fewer: they have the embedding and the logits (Llama 3
    2407.21783, section 3.3.2, takes one layer from the first and one from the last stage).
    """
    total = sum(count for count, again in zip(counts, repeated, strict=True) if again)
    shares = _shares(total, pp, chunks)
    ends = 0
    for kind, again in enumerate(repeated):
        if again:
            break
        ends = kind + 1
    stages = [[0] * len(counts) for _ in range(pp)]
    stage, room = 0, shares[0]
    for kind, count in enumerate(counts):
        if not repeated[kind]:
            stages[0 if kind < ends else -1][kind] = count
            continue
        left = count
        while left:
            while room == 0 and stage < pp - 1:
                stage += 1
                room = shares[stage]
            taken = min(left, room) if stage < pp - 1 else left
            stages[stage][kind] += taken
            left, room = left - taken, room - taken
    return tuple(tuple(stage) for stage in stages)


def _shares(total: int, pp: int, chunks: int) -> list[int]:
    """How many of `total` blocks each rank of a pipeline holds: equal shares where they divide.

    Else with one block less at both ends where that divides, or at the last one (Llama 3, 2407.21783, section 3.3.2,
    has a layer less beside the embedding and beside the logits); else arithmetic, as even as can be.
    """
    parts = pp * chunks
    if total % parts == 0 or pp == 1:
        return [total // pp] * (pp - 1) + [total - total // pp * (pp - 1)]
    if (total + 2) % parts == 0 or (total + 2) % pp == 0:
        each = (total + 2) // pp
        return [each - 1] + [each] * (pp - 2) + [each - 1]
    if (total + 1) % pp == 0:
        each = (total + 1) // pp
        return [each] * (pp - 1) + [each - 1]
    each, more = divmod(total, pp)
    # The longer stages stand in the middle, away from the embedding and the logits.
    shares = [each] * pp
    for place in range(more):
        shares[(place + (pp - more) // 2) % pp] += 1
    return shares


def stages_of(profile: ModelProfile, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The same for a profile."""
    blocks = profile.blocks
    # A model in which nothing repeats is cut between its parts.
    repeated = tuple(b.repeated if profile.num_repeated else b.parameters > 0 for b in blocks)
    return shared_out(tuple(b.count for b in blocks), repeated, pp, chunks)


def under_way(schedule: str, stage: int, pp: int, chunks: int, micro_steps: int) -> float:
    """Micro-steps whose activations a stage holds at most, in units of the whole rank's layers.

    1F1B: pp - stage (PipeDream-flush; 2104.04473, section 2.2.1). Interleaved: 1 + (pp - 1) / (pp * chunks) times pp on
    the first rank (2205.05198, section 4.2.3). GPipe: all. ZB-H2 doubles 1F1B's, ZB-H1 keeps it (2401.10241, table 2);
    ZB-V holds pp of whole ranks on each (2405.15362), DualPipeV one of two stages more. torch's interleaved ZB-H1
    holds pp, and what waits with the halves of weights of as many stages as there are ranks before.
    """
    if pp == 1:
        return 1.0
    if schedule in FORWARDS_FIRST:
        return float(micro_steps)
    if schedule in TWO_SIDED:
        return min(float(micro_steps), pp + 0.5 * (schedule == "dualpipev"))
    if schedule == "interleaved_zb":
        return min(float(micro_steps), pp + WAITING * stage / chunks)
    if schedule == "zb-2p":
        return float(min(micro_steps, 2 * pp - 1))
    if chunks > 1 or schedule.startswith("interleaved"):
        warm = 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
        return min(float(micro_steps), warm / chunks)
    return float(min(micro_steps, pp - stage))


def parted_share(schedule: str, pp: int, micro_steps: int) -> float:
    """Share of its backwards that the first rank makes in two parts, for the input first and for the weights later.

    All under zero bubble (2401.10241, section 2). DualPipeV parts 2 * pp - 1 of its two in each micro-step and overlaps
    the others with forwards (torch 2.13, distributed/pipelining/schedules.py, ScheduleDualPipeV).
    """
    if pp == 1 or schedule not in SPLIT:
        return 0.0
    return min(1.0, (2 * pp - 1) / (2 * micro_steps)) if schedule == "dualpipev" else 1.0


def pipeline_seconds(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    chunks: int,
    micro_steps: int,
) -> tuple[float, float]:
    """(Seconds of all micro-steps on the slowest stage, what the pipeline adds to fill and to drain).

    1F1B and GPipe: the other stages' forward and backward once (2104.04473, section 2.2.1). Interleaved: that over
    `chunks` (section 2.2.2). Zero bubble, 2401.10241, table 2: ZB-H1 leaves (pp - 1)(F + B - W), ZB-H2
    (pp - 1)(F + B - 2W). As torch 2.13's order tables (distributed/pipelining/schedules.py) say: interleaved_zb is
    ZB-H1 over `chunks`, where W fills no more than the shorter of F and B; of zbv and dualpipev it is their longest
    chain where F <= B and W <= B, as in blocks with attention, which has no W. ZB-V's own figure (2405.15362), that of
    ZB-H2, is for F = B = W, and for steps that begin before others have ended.
    """
    pp = len(forward)
    whole = [f + b + w for f, b, w in zip(forward, backward, weight, strict=True)]
    slowest = max(whole)
    steady = micro_steps * slowest
    if pp == 1:
        return steady, 0.0
    pace = whole.index(slowest)
    f, b, w = (sum(each) - each[pace] for each in (forward, backward, weight))
    if schedule in ("zb-1p", "interleaved_zb"):
        return steady, (f + b - min(f, b, w)) / chunks
    if schedule == "zb-2p":
        return steady, max(0.0, f + b - 2 * w)
    if schedule == "zbv":
        return steady, (b + max(0.0, b - 2 * w)) / chunks
    if schedule == "dualpipev":
        return steady, max(f + b - w, 2 * b - w - forward[pace]) / chunks
    return steady, (f + b + w) / (1 if schedule == "gpipe" else chunks)


def shared_bubble(steady: float, bubble: float, work: float, cores: float) -> float:
    """What a pipeline adds where processes share cores: one that waits leaves its core to one that computes.

    All seconds are those of a process that has `cores` (below 1) of one. Then the step takes as long as all work on all
    cores, `work` by process, or as its longest path with a core for each process on it: the two lower bounds of any
    schedule (Graham 1969, Bounds on Multiprocessing Timing Anomalies).
    """
    return max(0.0, max(work, (steady + bubble) * cores) - steady)
