"""Who else could choose among competing configurations, and by how much each choice is slower than the fastest."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from judged import Judged

Preference = Callable[[Judged], Any]
"""What a chooser takes the least of."""


def _fewest_cuts(one: Judged) -> tuple[int, int]:
    """The field's rule of thumb: as little tensor and pipeline parallelism as possible, then large micro-batches."""
    parallel = one.row["parallel"]
    return parallel["tp"] * parallel["pp"], -(parallel.get("mbs") or 1)


CHOOSERS: Mapping[str, Preference] = {
    "allranks": lambda one: one.seconds,
    "Calculon": lambda one: one.row["calculon_pred_s"],
    "least tp*pp, most micro-batch": _fewest_cuts,
}


def groups_of(judged: Sequence[Judged]) -> list[list[Judged]]:
    """Rows that compete: the same model, batch and devices."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.published_seconds and one.row.get("rank_group"):
            groups[one.row["rank_group"]].append(one)
    return [group for group in groups.values() if len(group) > 1]


def regret_of(group: Sequence[Judged], prefers: Preference) -> float:
    """By how much what it chooses is slower than the fastest; of equal ones the first of the table is taken."""
    taken = min(group, key=prefers).published_seconds
    best = min(one.published_seconds for one in group if one.published_seconds)
    assert taken is not None
    return taken / best - 1


def regrets_of(judged: Sequence[Judged]) -> list[float]:
    """Of taking the configuration that is predicted to be the fastest, in every group."""
    return [regret_of(group, CHOOSERS["allranks"]) for group in groups_of(judged)]


def compare_choosers(sources: Mapping[str, Sequence[Judged]]) -> dict[str, dict[str, Any]]:
    """By source and in "all": the mean regret of each chooser, on the groups of which Calculon predicted every row."""
    every, found = [], {}
    for name, judged in sources.items():
        kept = [group for group in groups_of(judged) if all(one.row.get("calculon_pred_s") for one in group)]
        every += kept
        if kept:
            found[name] = _means(kept)
    return {**found, "all": _means(every)} if every else {}


def _means(groups: Sequence[Sequence[Judged]]) -> dict[str, Any]:
    return {
        "groups": len(groups),
        **{name: statistics.fmean(regret_of(group, prefers) for group in groups) for name, prefers in CHOOSERS.items()},
    }
