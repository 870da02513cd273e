"""The learning rate as a function of samples seen, so that it means the same for every number of devices (law 1)."""

import math
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a shape.

    Attributes:
        name: the shape after the warm-up.
        warmup_samples: samples over which the rate rises linearly from zero; the first step already gets its share.
        total_samples: samples at which `floor` is reached (linear, cosine).
        floor: the rate at the end, as a fraction of the peak.
    """

    name: Literal["constant", "linear", "cosine"]
    warmup_samples: int
    total_samples: int
    floor: float

    def factor(self, samples: int, step_samples: int) -> float:
        """The fraction of the peak rate for a step of `step_samples` samples that begins after `samples` samples."""
        if samples < self.warmup_samples:
            return min(1.0, (samples + step_samples) / self.warmup_samples)
        if self.name == "constant":
            return 1.0
        span = max(1, self.total_samples - self.warmup_samples)
        progress = min(1.0, (samples - self.warmup_samples) / span)
        shape = 1.0 - progress if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * shape

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps: the schedule of the first start stays through every resume."""
        return asdict(self)
