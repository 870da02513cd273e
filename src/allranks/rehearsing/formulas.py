"""Closed forms beside the simulation: the best interval between checkpoints, and the goodput of a run that fails."""

import math


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
    """The share of the time that is training which the end still has (ETTR), in a run without end.

    Failures come at a constant rate 1 / M, at any time: within an interval, and again while the run is down, which
    begins that anew. An interval of t and a save of d are kept only if nothing fails meanwhile; trying until that is so
    takes M exp(R / M) (exp((t + d) / M) - 1) in the mean, all orders of it, with R from a failure until training goes
    on. A save that counts only L after it has begun is as if R were longer by L.

    Args:
        per_second: failures of the whole run in a second; 0: nothing fails.
        down_seconds: from a failure until training goes on, and how late a save counts.
        every_seconds: of training between two saves; save_seconds: that each stops the step for.

    Source: J. T. Daly (as above), the complete cost function, from which equation 37 comes. To first order it is that
    of A. Kokolis et al., HPCA 2025 (arXiv 2410.21680): (1 - (R + t / 2) / M) / (1 + d / t).
    """
    if not per_second:
        return every_seconds / (every_seconds + save_seconds)
    alive = per_second * (every_seconds + save_seconds)
    # exp(x) - 1 as exp(x) (1 - exp(-x)): where hardly anything gets through, nothing overflows.
    return every_seconds * per_second * math.exp(-per_second * down_seconds - alive) / -math.expm1(-alive)
