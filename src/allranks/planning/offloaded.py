"""Where nothing fits on the devices: the fastest that fits once parameters and optimizer state wait in the host."""

from dataclasses import replace

from allranks.layout_string import MODES
from allranks.plan import Estimate, Ranked, Refusal
from allranks.planning.choices import Space
from allranks.planning.reasons import refused_by_host
from allranks.planning.search import Search
from allranks.units import format_bytes, format_seconds

MODE = "offload=parameters"


def with_parameters_on_host(space: Space, closest: Estimate, *, checked: bool = False) -> Ranked | Refusal | None:
    """The best of the same space with `offload=parameters`, and its price beside `closest`, which does not fit.

    A Refusal where the hosts' memory alone is too small, as far as anybody says how much there is; None where it does
    not fit on the devices either, or the user has fixed another offload. `checked`: others were rehearsed, which is
    said to be left out here.
    """
    if space.modes.get("offload") is not None:
        return None
    layout = space.layout
    if layout is not None and layout.offload != "none":
        return None
    modes = dict(space.modes) if layout is not None else {**space.modes, "offload": "parameters"}
    fixed = None if layout is None else replace(layout, offload="parameters")
    searched = Search(replace(space, modes=modes, layout=fixed)).run()
    found = searched.best
    if found is None:
        return None if searched.nearest is None else refused_by_host(searched.nearest)
    asked = (
        str(fixed)
        if fixed is not None
        else ",".join(["auto", *(f"{key}={value}" for key, value in modes.items() if key in MODES)])
    )
    left = "; --check has not rehearsed it" if checked else ""
    return Ranked(found, f"{price_of(found, closest)}{left}; ask for it: --layout {asked}")


def price_of(found: Estimate, closest: Estimate) -> str:
    """What a node's memory has to hold, and how much longer a step takes than the one that does not fit."""
    held = f"{format_bytes(found.host_bytes)} in each host's memory"
    if found.host_capacity_bytes is None:
        held += " (nobody says how much it has: host_memory_gb in a cluster file)"
    else:
        held += f" of {format_bytes(found.host_capacity_bytes)}"
    seconds = found.step_seconds.expected
    speed = found.samples_per_second / closest.samples_per_second - 1 if closest.samples_per_second else 0.0
    fits = "may fit" if found.host_capacity_bytes is None else "fits"
    return (
        f"{fits} with {MODE}: {format_bytes(found.peak_bytes.expected)} of {format_bytes(found.capacity_bytes)}, and"
        f" {held}; a step takes {format_seconds(seconds)}, {speed:+.0%} speed beside the closest"
    )
