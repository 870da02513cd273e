"""The rules that ask how a step is cut into micro-steps: what `data/cut` refuses, before anybody starts it."""

from allranks.cluster import Cluster
from allranks.even_cut import MOST_MICRO_STEPS
from allranks.layout import Layout
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Refusal

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
        return Refusal("pipeline_batch", where, f"{because}dp={layout.dp} leaves {left}")
    if share % choice.micro_batch:
        because = f"does not divide the {share} samples of a data-parallel rank, and pp={layout.pp} wants one shape"
        return Refusal("pipeline_batch", f"{where},micro_batch={choice.micro_batch}", because)
    micro_steps = share // choice.micro_batch
    if layout.fits_schedule(micro_steps):
        return None
    rounds = f", in multiples of {layout.pp}" if layout.num_stages > layout.pp else ""
    because = f"schedule={layout.schedule} over {layout.num_stages} stages takes as many micro-steps at least{rounds}"
    return Refusal("pipeline_batch", where, f"{because}; a rank has {micro_steps}")


def micro_steps(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """A step has no more of them than training takes."""
    number = -(-choice.global_batch // (choice.layout.dp * choice.micro_batch))
    if number <= MOST_MICRO_STEPS:
        return None
    because = f"a step of {choice.global_batch} samples has {number:,} micro-steps, and can have {MOST_MICRO_STEPS:,}"
    return Refusal("micro_steps", f"{name_data(choice.layout)},micro_batch={choice.micro_batch}", because)


def name_data(layout: Layout) -> str:
    """Its data-parallel degrees, as a layout string has them."""
    written = [f"{axis}={degree}" for axis in ("dp_replicate", "dp_shard") if (degree := getattr(layout, axis)) > 1]
    return ",".join(written) or "single"


def name_stages(layout: Layout) -> str:
    """Its pipeline and, where it is not the usual one, the schedule."""
    return f"pp={layout.pp}" + ("" if layout.schedule == "1f1b" else f",schedule={layout.schedule}")
