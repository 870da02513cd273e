"""An exponential moving average of the parameters (EMA), kept part by part where this rank's parts lie.

After each optimizer step `average = decay * average + (1 - decay) * parameter`, beginning with the parameters as they
are. An element is averaged by itself, so every layout computes what one device computes; of a parameter that is cut a
rank averages its own part, and under sharding=optimizer its rows. Buffers are not averaged: running statistics are
averages already, and torch's `AveragedModel` takes the model's own, too.

Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with the exponential
weights of torch.optim.swa_utils.get_ema_multi_avg_fn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from torch.distributed.tensor import DTensor

from allranks.errors import TaskError
from allranks.parallel.spread import Spread
from allranks.parameter_map import Entry
from allranks.verdict import Decision

HELD_AT_THE_END = 0.05
"""An average that gives the initial values more weight than this at the end of the run is told of."""


@final
class Ema:
    """The average of every trainable parameter of a Spread, in the parameters' own type (float32 at least).

    Args:
        decay: what stays of the average in an optimizer step, between 0 and 1.

    Attributes:
        prefix: how its names in a checkpoint begin, `ema.<parameter>`.
    """

    prefix = "ema."

    def __init__(self, spread: Spread, decay: float) -> None:
        self._spread = spread
        self._decay = decay
        self._parameters = spread.updatable()
        self._averages = [part.clone() for part in self._live()]
        self._in_place = False

    @torch.no_grad()
    def update(self, skipped: torch.Tensor | None = None, *, steps: int = 1) -> None:
        """Take the parameters of a finished optimizer step in; not where `skipped`, on the device, is 1.0.

        Args:
            steps: how many have gone since they were last taken in: so many times they count.

        Raises:
            TaskError: inside `in_place`.
        """
        self._check_apart("trained")
        weight = 1.0 - self._decay**steps
        if skipped is not None and skipped.device.type == "cpu" and bool(skipped):
            return
        if skipped is None:
            torch._foreach_lerp_(self._averages, self._live(), weight)
        else:
            weight_or_0 = weight * (1.0 - skipped)
            # Some may wait in the host's memory.
            at = {device: weight_or_0.to(device) for device in {average.device for average in self._averages}}
            weights = [at[average.device] for average in self._averages]
            torch._foreach_lerp_(self._averages, self._live(), weights)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew with the parameters as they are."""
        torch._foreach_copy_(self._averages, self._live())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averages for parameters; afterwards its own again, bit by bit.

        Collective under sharding=optimizer. What is trained or saved inside is refused: TaskError.
        """
        self._check_apart("averaged again")
        self._exchange()
        self._in_place = True
        try:
            yield
        finally:
            self._in_place = False
            self._exchange()

    def parts(self) -> list[tuple[Entry, torch.Tensor]]:
        """Every average as this rank holds it, by its name in the checkpoint. Raises TaskError inside `in_place`."""
        self._check_apart("saved")
        entries = (self._spread.updatable_entry(name) for name in self._parameters)
        named = [replace(entry, name=f"{self.prefix}{entry.name}") for entry in entries]
        return list(zip(named, self._averages, strict=True))

    def aliases(self) -> dict[str, str]:
        """Tied names, by their names in the checkpoint."""
        tied = self._spread.map.aliases.items()
        return {f"{self.prefix}{alias}": f"{self.prefix}{name}" for alias, name in tied if name in self._parameters}

    def _check_apart(self, done: str) -> None:
        if self._in_place:
            raise TaskError(
                f"inside `with average.in_place()` the model has the averages for parameters, and is not {done}: leave "
                "it first"
            )

    def _live(self) -> list[torch.Tensor]:
        # Asked each time: FSDP2 may give a parameter other memory when it is first used.
        return [p._local_tensor if isinstance(p, DTensor) else p.detach() for p in self._parameters.values()]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Parameters and averages change places, one tensor at a time: nothing is held twice."""
        self._spread.reshard()
        for average, live in zip(self._averages, self._live(), strict=True):
            kept = live.clone()
            live.copy_(average)
            average.copy_(kept)
        if self._spread.row_shards is not None:
            self._spread.row_shards.gather(list(self._spread.trainable().values()))


def describe_ema(decay: float, num_steps: int | None, *, evaluates: bool) -> tuple[Decision, ...]:
    """What is told of an average at the start.

    Args:
        num_steps: optimizer steps of the whole run; None where nobody knows.
        evaluates: whether a validation split is measured.
    """
    found = []
    if evaluates:
        what = "validation measures the average of the parameters, with the model's own buffers"
        found.append(Decision(what, f"train.ema={decay:g}"))
    if num_steps is not None and (held := decay**num_steps) > HELD_AT_THE_END:
        what = f"at the end {held:.0%} of the average is still the initial values"
        fits = HELD_AT_THE_END ** (1 / num_steps)
        because = f"train.ema={decay:g} over {num_steps} steps; {fits:.4g} would leave {HELD_AT_THE_END:.0%}"
        found.append(Decision(what, because))
    return tuple(found)
