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
TRAINED = 0.9
"""Of the best product that somebody measured on a device, what products reach while it trains: the fitted shares of the
V100 and the A100 are 0.93 and 0.905 of their best."""
FOUND_AT = 8192
"""Positions of the runs that the A100's `flash2` was found with."""
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
        flash2_long: what FlashAttention-2 comes near to on long sequences, where `flash2` was found on 8192 positions;
            0 where nothing says that it is another.
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
    flash2_long: float = 0.0
    family: str = ""

    def attention_share(self, kernel: AttentionKernel, positions: float = 0.0) -> float:
        """What a kernel of fused attention reaches of the 16-bit peak in the forward, over so many positions at once.

        What is around the kernel grows with the positions, its products with their square: beyond 8192 the rest of the
        time that `flash2` counts falls as 1 / positions. Arithmetic from these two growths; the shares are fitted, or
        from FlashAttention-2's own table (2307.08691): docs/explanation/planner.md says which.
        """
        share = {"vendor": self.attention, "flash1": self.flash1, "flash2": self.flash2}[kernel]
        if kernel != "flash2" or self.flash2_long <= share or positions <= FOUND_AT:
            return share
        return 1 / (1 / self.flash2_long + (1 / share - 1 / self.flash2_long) * FOUND_AT / positions)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text())
    return table


@cache
def constants_of_name(name: str) -> tuple[str, Constants]:
    """(The entry of the table whose name `name` begins with or "", its constants).

    An A800 and an H800 are an A100 and an H100 with fewer links.
    """
    table, same = _table()["devices"], _table()["same_chip"]
    name = next((chip + name.removeprefix(one) for one, chip in same.items() if name.startswith(one)), name)
    family = max((key for key in table if name.startswith(key)), key=len, default="")
    return family, Constants(**{**table["default"], **table.get(family, {}), "family": family})


def constants_of(device: Device) -> Constants:
    """Those of the device's family (the longest name in the table that its name begins with), else the defaults.

    Where somebody measured a matrix product on a device of no known family, its rate says what is reached, of attention
    as much more or less; the rates that `allranks doctor --calibrate` measured are taken as they are.
    """
    family, known = constants_of_name(device.name.lower())
    peak = device.peak_flops.get("bfloat16") or device.peak_flops.get("float16") or device.peak_flops.get("float32")
    rates = device.matmul_flops
    measured = rates.get("bfloat16") or rates.get("float16") or rates.get("float32")
    if peak and measured and device.measured:
        known = replace(known, matmul=min(1.0, measured / peak))
    elif peak and measured and not family:
        share = min(1.0, TRAINED * measured / peak)
        more = share / known.matmul
        known = replace(
            known, matmul=share, attention=known.attention * more, flash1=known.flash1 * more,
            flash2=known.flash2 * more,
        )  # fmt: skip
    if device.measured:  # what was measured is what is reached, not what a data sheet promises
        known = replace(known, memory=1.0, inside=1.0, between=1.0)
    return known
