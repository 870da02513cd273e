"""Which published rows the constants were fitted to; every other row is held out of the fit.

    python bench/calibration_rows.py [FILE] [--looked-at]

Prints their names. Half of the rows of some sources, by the digest of their names, and none of the others. With
--looked-at the rows that a figure which is no fitted constant was set by, held-out ones among them, each with the
figure's name.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from published_runs import rows_of

DATA = Path(__file__).parent / "data" / "published-runs.json"
FITTED = (
    *("bloom-prequel", "dgxc-benchmarking", "llm-foundry", "megatron-bridge", "nemo-24.07", "simumax-b200"),
    *("torchtitan-2024-12", "vtrain-multi", "vtrain-single", "zero-bubble-table4"),
)
"""Sources that lend half of their rows; no constant has seen any row of another."""

PEAKS = ("mem_gib_peak", "mem_gb_peak")
LOOKED_AT: Mapping[str, Callable[[Any], bool]] = {
    "constants.json: flash2 of the A100": lambda row: row["source"] == "torchtitan-a100-2024",
    "uncertainty.py: EXPERTS": lambda row: bool(row["model"].get("experts") and row["metrics"].get("step_time_s")),
    "room.py: MEMORY_LOW, PEAK_HIGH, MEMORY_HIGH": lambda row: any(row["metrics"].get(key) for key in PEAKS),
}
"""Figure -> whether it was set while looking at a row: by hand, to hold so many of them (see planner.md)."""


def is_calibration(row: Any) -> bool:
    """Whether the constants were fitted to this row, among others."""
    if row["source"] not in FITTED or row.get("quality") == "C" or not row["metrics"].get("step_time_s"):
        return False
    if row["model"].get("experts"):  # how experts are served differs from release to release: nothing is fitted to it
        return False
    return hashlib.sha256(row["id"].encode()).digest()[0] % 2 == 0


def set_by(row: Any) -> list[str]:
    """The figures of LOOKED_AT that this row had a part in."""
    return [name for name, took in LOOKED_AT.items() if took(row)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DATA)
    parser.add_argument("--looked-at", action="store_true", help="the rows of other figures than fitted constants")
    arguments = parser.parse_args()
    for row in rows_of(json.loads(arguments.file.read_text())):
        if arguments.looked_at:
            for figure in set_by(row):
                print(f"{row['id']}: {figure}")
        elif is_calibration(row):
            print(row["id"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
