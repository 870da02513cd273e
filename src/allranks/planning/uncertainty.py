"""How far a step may lie from its estimate: each cause with its own doubt, in the logarithm of the time."""

import math

from allranks.model_profile import ModelProfile
from allranks.plan import StepTime
from allranks.planning.setting import Setting

DOUBTS = {
    "compute": 0.091,
    "recompute": 0.10,
    "tensor": 0.30,
    "context": 0.40,
    "expert": 0.45,
    "data": 0.6,
    "pipeline": 0.40,
    "bubble": 0.20,
    "optimizer": 0.40,
    "offload": 0.50,
    "input": 0.50,
    "checkpoint": 0.50,
}
"""Of one cause's seconds: one standard deviation, from calibration rows where that cause is a large share."""
LOW_PRECISION, EXPERTS, UNKNOWN_DEVICE, UNKNOWN_FRAMEWORK, HOST = 0.025, 0.16, 0.10, 0.10, 0.04
"""More of it where products are in 8 or 4 bits, for experts' many small kernels, for a device that no constants are
known for, for a framework whose documents nobody has read, and for the share of a step that waits for the host. That of
experts holds nine of ten of all rows that have them: calibration has none."""
NINETY = 1.645
"""Standard deviations on either side of the mean that hold 90% (normal distribution)."""


def spread_of(time: StepTime, profile: ModelProfile, setting: Setting, known_device: bool, host_share: float) -> float:
    """The factor f such that 90% of steps take between seconds / f and seconds * f.

    The doubts of different causes are independent: their squares add, each weighted with its share of the step (JCGM
    100:2008, section 5.1.2, on logarithms; a normal distribution's 90%).
    """
    total = time.total
    if not total:
        return 1.0
    compute = DOUBTS["compute"]
    compute += LOW_PRECISION if setting.precision in ("float8", "float4") else 0.0
    compute += EXPERTS if profile.experts else 0.0
    compute += HOST * host_share
    compute += 0.0 if known_device else UNKNOWN_DEVICE
    compute += 0.0 if setting.mechanisms.known else UNKNOWN_FRAMEWORK
    squares = (compute * (time.compute + time.recompute) / total) ** 2
    for cause, doubt in DOUBTS.items():
        if cause not in ("compute", "recompute"):
            squares += (doubt * getattr(time, cause, 0.0) / total) ** 2
    return math.exp(NINETY * math.sqrt(squares))
