"""Which published rows the constants were fitted to; every other row is held out.

    python bench/calibration_rows.py [FILE]

Prints their names. Half of the rows of some sources, by the digest of their names, and none of the others.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from published_runs import rows_of

DATA = Path(__file__).parent / "data" / "published-runs.json"
FITTED = (
    *("bloom-prequel", "dgxc-benchmarking", "llm-foundry", "megatron-bridge", "nemo-24.07", "simumax-b200"),
    *("torchtitan-2024-12", "vtrain-multi", "vtrain-single", "zero-bubble-table4"),
)
"""Sources that lend half of their rows; no constant has seen any row of another."""


def is_calibration(row: Any) -> bool:
    """Whether the constants were fitted to this row, among others."""
    if row["source"] not in FITTED or row.get("quality") == "C" or not row["metrics"].get("step_time_s"):
        return False
    if row["model"].get("experts"):  # how experts are served differs from release to release: nothing is fitted to it
        return False
    return hashlib.sha256(row["id"].encode()).digest()[0] % 2 == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DATA)
    for row in rows_of(json.loads(parser.parse_args().file.read_text())):
        if is_calibration(row):
            print(row["id"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
