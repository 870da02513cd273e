"""Closed forms beside the simulation: the best interval between checkpoints, and the goodput of a run that fails."""

import math

HOLDS = 0.25
"""The closed form of goodput counts half an interval lost by every failure and no failure during a restart; beyond
this share of the time lost that is off by more than a point (test_formulas.py compares)."""


def young_interval(save_seconds: float, mean_seconds: float) -> float:
    """The interval that loses least, first order: sqrt(2 * save * MTBF).

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974), equation 9.
    """
    return math.sqrt(2 * save_seconds * mean_seconds)


def daly_interval(save_seconds: float, mean_seconds: float) -> float:
    """The same of higher order; MTBF where a save takes longer than twice that.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006),
    equation 37.
    """
    ratio = save_seconds / (2 * mean_seconds)
    if ratio >= 1:
        return mean_seconds
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * save_seconds * mean_seconds) * series - save_seconds


def expected_goodput(per_second: float, down_seconds: float, every_seconds: float, save_seconds: float) -> float:
    """The share of the time that is training which the end still has (ETTR).

    Args:
        per_second: failures of the whole run in a second.
        down_seconds: from a failure until training goes on.
        every_seconds: between two saves; save_seconds: that each stops the step for.

    Source: A. Kokolis et al., Revisiting reliability in large-scale machine learning research clusters, HPCA 2025
    (arXiv 2410.21680): (1 - N r (u0 + dt / 2)) / (1 + w / dt).
    """
    return (1 - per_second * (down_seconds + every_seconds / 2)) / (1 + save_seconds / every_seconds)
