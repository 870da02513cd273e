"""The rule of what makes copies send each other less: `layout.ddp_hook` and `layout.local_sgd`."""

from functools import lru_cache

from allranks.cluster import Cluster
from allranks.config import Config, TrainConfig
from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Refusal
from allranks.slow_links import check_slow_links


def slow_links(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """They need copies that DDP keeps equal, and do not go with each other; said as the engine says it."""
    layout = choice.layout
    if layout.ddp_hook == "none" and layout.local_sgd is None:
        return None
    because = _refused(layout, choice.precision == "float16")
    if because is None:
        return None
    name = f"local_sgd={layout.local_sgd}" if layout.local_sgd is not None else f"ddp_hook={layout.ddp_hook}"
    return Refusal("slow_links", name, because)


@lru_cache(maxsize=4096)
def _refused(layout: Layout, scaled: bool) -> str | None:
    config = Config(train=TrainConfig(precision="float16" if scaled else "float32"))
    try:
        check_slow_links(config, layout)
    except LayoutError as error:
        return str(error)
    return None
