"""The average that follows the parameters of a loop of one's own."""

from allranks.errors import ConfigError, TaskError
from allranks.parallel.spread import Spread
from allranks.stepping.ema import Ema
from allranks.stepping.scaler import Scaler
from allranks.training.own.links import Links


def add_average(spread: Spread, decay: float, beside: list[Ema | Scaler], links: Links) -> Ema:
    """Average the parameters of `spread` from here on. Raises TaskError, ConfigError, LayoutError: see `World.ema`.

    Args:
        beside: what has tensors to keep, which gets the average too.
    """
    links.check_apart("world.ema()")
    if any(isinstance(other, Ema) for other in beside):
        raise TaskError("world.ema() was called already: a world has one average of its model")
    if not 0 < decay < 1:
        raise ConfigError(f"world.ema(decay={decay}): expected a number between 0 and 1, such as 0.999")
    beside.append(average := Ema(spread, decay))
    return average
