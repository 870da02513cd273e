"""The rules that ask how a step is cut into micro-steps: what `data/cut` refuses, before anybody starts it."""

from functools import lru_cache

from allranks.cluster import Cluster
from allranks.even_cut import MOST_MICRO_STEPS, divisors
from allranks.layout import Layout
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Refusal

NEAR = 3
"""So many of the sizes that could stand instead are named."""
OF_MICRO_BATCH = ("pipeline_batch", "micro_steps")
"""Those that let the same layout in with another micro-batch."""


def pipeline_batch(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """Micro-steps of a pipeline have one shape, and are as many as the schedule takes."""
    layout = choice.layout
    if layout.pp == 1:
        return None
    share, left = divmod(choice.global_batch, layout.dp)
    where = name_stages(layout) if layout.dp == 1 else f"{name_data(layout)},{name_stages(layout)}"
    if left:
        because = f"pp={layout.pp} wants equal shares, and a global batch of {choice.global_batch} over "
        return Refusal("pipeline_batch", where, f"{because}dp={layout.dp} leaves {left}; {_instead(choice)}")
    if share % choice.micro_batch:
        because = f"does not divide the {share} samples of a data-parallel rank, and pp={layout.pp} wants one shape"
        return Refusal("pipeline_batch", f"{where},micro_batch={choice.micro_batch}", f"{because}; {_instead(choice)}")
    micro_steps = share // choice.micro_batch
    if layout.fits_schedule(micro_steps):
        return None
    rounds = f", in multiples of {layout.pp}" if layout.num_stages > layout.pp else ""
    because = f"schedule={layout.schedule} over {layout.num_stages} stages takes as many micro-steps at least{rounds}"
    return Refusal("pipeline_batch", where, f"{because}; a rank has {micro_steps}: {_instead(choice)}")


def micro_steps(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """A step has no more of them than training takes."""
    layout = choice.layout
    number = -(-choice.global_batch // (layout.dp * choice.micro_batch))
    if number <= MOST_MICRO_STEPS:
        return None
    because = f"a step of {choice.global_batch} samples has {number:,} micro-steps, and can have {MOST_MICRO_STEPS:,}"
    instead = f"micro_batch can be {-(-choice.global_batch // (layout.dp * MOST_MICRO_STEPS))} or more"
    if layout.pp > 1:
        instead = _instead(choice)
    return Refusal("micro_steps", f"{name_data(layout)},micro_batch={choice.micro_batch}", f"{because}; {instead}")


def least_batch(choice: Choice) -> int:
    """The fewest samples with which every rank has one in every step, and every stage a micro-step to work on."""
    layout = choice.layout
    return layout.dp * (1 if layout.pp == 1 else choice.micro_batch * layout.num_stages)


def _instead(choice: Choice) -> str:
    layout = choice.layout
    return near_cuts(choice.global_batch, choice.micro_batch, layout.dp, layout.pp, layout.num_stages)


@lru_cache(maxsize=4096)
def near_cuts(global_batch: int, micro_batch: int, dp: int, pp: int, num_stages: int) -> str:
    """`micro_batch can be 5, 2, 1 (2, 5, 10 micro-steps)`: the nearest that cut this batch; else which batches can be.

    Args:
        global_batch, micro_batch: of a step that the pipeline does not take.
        dp, pp, num_stages: of its layout; in all they say which numbers of micro-steps its schedule takes.
    """
    rounds = pp if num_stages > pp else 1
    share, left = divmod(global_batch, dp)
    counts = [number for number in divisors(share) if _takes(number, num_stages, rounds)] if share and not left else []
    if counts:
        sizes = sorted((share // number for number in counts), key=lambda size: abs(size - micro_batch))[:NEAR]
        steps = ", ".join(f"{share // size:,}" for size in sizes)
        return f"micro_batch can be {', '.join(map(str, sizes))} ({steps} micro-steps)"
    unit = dp * micro_batch
    most = MOST_MICRO_STEPS // rounds * rounds
    below = min(global_batch // unit // rounds * rounds, most)
    near = {max(below, num_stages), min(max(below + rounds, num_stages), most)}
    return f"global_batch can be {' or '.join(str(number * unit) for number in sorted(near))}"


def _takes(micro_steps: int, num_stages: int, rounds: int) -> bool:
    """As `Layout.fits_schedule`, and no more than a step may have."""
    return num_stages <= micro_steps <= MOST_MICRO_STEPS and micro_steps % rounds == 0


def name_data(layout: Layout) -> str:
    """Its data-parallel degrees, as a layout string has them."""
    written = [f"{axis}={degree}" for axis in ("dp_replicate", "dp_shard") if (degree := getattr(layout, axis)) > 1]
    return ",".join(written) or "single"


def name_stages(layout: Layout) -> str:
    """Its pipeline and, where it is not the usual one, the schedule."""
    return f"pp={layout.pp}" + ("" if layout.schedule == "1f1b" else f",schedule={layout.schedule}")
