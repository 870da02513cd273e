"""Constants: the few figures per device that no data sheet gives, from data/constants.json.

What each is, and which of them were fitted to which published runs, says docs/explanation/planner.md;
bench/fit_constants.py fits them.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, final

from allranks.cluster import Device

FILE = Path(__file__).parent / "data" / "constants.json"
AttentionKernel = Literal["vendor", "flash1", "flash2"]


@final
@dataclass(frozen=True, slots=True)
class Constants:
    """What a device family reaches of its data sheet while it trains.

    Attributes:
        units: processors that work on the tiles of a matrix product (streaming multiprocessors); from the data sheet.
        matmul, matmul_low: share of the peak that a large product reaches in 16 bits, and in 8 or 4.
        attention, flash1, flash2: share of the 16-bit peak that the vendor's fused attention, FlashAttention of 2022
            (its Triton kernel) and FlashAttention-2 reach in the forward; their backward 0.8 of that.
        memory: share of the memory's bandwidth that elementwise kernels reach.
        inside, between: share of a link's bandwidth that large collectives reach, in a node and between nodes.
        depth: inner features at which prologue and epilogue of a tile take as long as its products.
        base_seconds, hop_seconds: of a collective inside a node: what it takes at least, and for each further rank.
        family: entry of the table; "" where nothing but the defaults is known.
    """

    units: int
    matmul: float
    matmul_low: float
    attention: float
    flash1: float
    flash2: float
    memory: float
    inside: float
    between: float
    depth: float
    base_seconds: float
    hop_seconds: float
    family: str = ""

    def attention_share(self, kernel: AttentionKernel) -> float:
        """What a kernel of fused attention reaches of the 16-bit peak in the forward."""
        return {"vendor": self.attention, "flash1": self.flash1, "flash2": self.flash2}[kernel]


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text())
    return table


@cache
def constants_of_name(name: str) -> tuple[str, Constants]:
    """(The entry of the table whose name `name` begins with or "", its constants)."""
    table = _table()["devices"]
    family = max((key for key in table if name.startswith(key)), key=len, default="")
    return family, Constants(**{**table["default"], **table.get(family, {}), "family": family})


def constants_of(device: Device) -> Constants:
    """Those of the device's family (the longest name in the table that its name begins with), else the defaults.

    Where somebody measured a matrix product on the device, its rate takes the place of a family that is not known.
    """
    family, known = constants_of_name(device.name.lower())
    peak = device.peak_flops.get("bfloat16") or device.peak_flops.get("float16") or device.peak_flops.get("float32")
    rates = device.matmul_flops
    measured = rates.get("bfloat16") or rates.get("float16") or rates.get("float32")
    if peak and measured and (not family or device.measured):
        known = replace(known, matmul=min(1.0, measured / peak))
    if device.measured:  # what was measured is what is reached, not what a data sheet promises
        known = replace(known, memory=1.0, inside=1.0, between=1.0)
    return known
