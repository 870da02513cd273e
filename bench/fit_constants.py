"""Fits the constants of planning/data/constants.json to the calibration rows, and prints them.

    python bench/fit_constants.py [FILE ...] [--start FILE] [--only FAMILY,...] [--rounds N] [--write]

The least sum of |log(predicted / published)| of the step time over the rows that calibration_rows.py names, each source
with the same weight per device, by coordinate search; a constant moves between bounds that physics gives. What a data
sheet says (peaks, bandwidths, processors) is not fitted, nor is anything by model, by source or by layout.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from calibration_rows import DATA, is_calibration
from frameworks import mechanisms_of
from judged import Judged, judge
from published_models import Row, precision_of
from published_runs import device_name, rows_of

from allranks.planning import block_parts, constants

BOUNDS = {
    "depth": (16, 400),
    "flash1": (0.15, 0.9),
    "flash2": (0.15, 0.9),
    "contention": (0.0, 0.6),
    "matmul": (0.3, 0.95),
    "matmul_low": (0.2, 0.9),
    "attention": (0.15, 0.65),
    "memory": (0.5, 0.95),
    "inside": (0.3, 0.95),
    "between": (0.3, 0.95),
    "kernel_seconds": (1e-6, 8e-6),
}


def loss(judged: Iterable[Judged]) -> float:
    """Mean over sources of the mean |log(predicted / published)|."""
    sources: dict[str, list[float]] = {}
    for one in judged:
        if one.published_seconds:
            sources.setdefault(one.row["source"], []).append(abs(math.log(one.seconds / one.published_seconds)))
    weights = {name: math.sqrt(len(errors)) for name, errors in sources.items()}
    total = sum(weights[name] * sum(errors) / len(errors) for name, errors in sources.items())
    return total / sum(weights.values()) if weights else 0.0


def search(start: float, bounds: tuple[float, float], value: Callable[[float], float]) -> float:
    """The best of a geometric grid around `start` that closes in on it."""
    best, least, step = start, value(start), 1.3
    while step > 1.008:
        for factor in (1 / step, step):
            while (candidate := min(bounds[1], max(bounds[0], best * factor))) != best:
                if (found := value(candidate)) >= least - 1e-6:
                    break
                best, least = candidate, found
        step = step**0.5
    return best


def fit(rows: Sequence[Row], rounds: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Family -> constants."""
    table: dict[str, dict[str, Any]] = constants._table()["devices"]
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(family_of(row), []).append(row)
    for family, members in families.items():
        weighty = [name for name in names if sees(members, name)]
        for _ in range(rounds):
            for name in weighty:
                given = table[family].get(name, table["default"][name])

                def value(
                    candidate: float, name: str = name, family: str = family, members: list[Row] = members
                ) -> float:
                    table[family][name] = candidate
                    constants.constants_of_name.cache_clear()
                    block_parts.forget()
                    return loss(judge(members))

                table[family][name] = round(search(given, BOUNDS[name], value), 3)
        block_parts.forget()
        constants.constants_of_name.cache_clear()
        print(
            f"{family}: {len(members)} rows, loss {loss(judge(members)):.3f}",
            {n: table[family].get(n) for n in names},
            flush=True,
        )
    return table


def sees(rows: Sequence[Row], name: str) -> bool:
    """Whether any of the rows depends on a constant."""
    precisions = {precision_of(row) in ("float8", "float4") for row in rows}
    kernels = {mechanisms_of(row).attention for row in rows if mechanisms_of(row).fused_attention}
    return {
        "matmul": False in precisions, "matmul_low": True in precisions, "attention": "vendor" in kernels,
        "flash1": "flash1" in kernels, "flash2": "flash2" in kernels,
    }.get(name, True)  # fmt: skip


def family_of(row: Row) -> str:
    """The entry of constants.json that the row's device takes."""
    name = device_name(row["hardware"]["gpu"])
    found: str = max((key for key in constants._table()["devices"] if name.startswith(key)), key=len)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[DATA])
    parser.add_argument("--start", type=Path, default=constants.FILE, help="constants to start from")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--names", default="matmul,matmul_low,attention,flash1,flash2")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    constants._table()["devices"].update(json.loads(arguments.start.read_text())["devices"])
    rows = [row for file in arguments.files for row in rows_of(json.loads(file.read_text())) if is_calibration(row)]
    if arguments.only:
        rows = [row for row in rows if family_of(row) in arguments.only.split(",")]
    table = fit(rows, arguments.rounds, arguments.names.split(","))
    if arguments.write:
        constants.FILE.write_text(dump(table))
    return 0


def dump(table: Any) -> str:
    """One line a device."""
    lines = ",\n".join(f'    "{name}": {json.dumps(values)}' for name, values in table.items())
    return '{\n  "devices": {\n' + lines + "\n  }\n}\n"


if __name__ == "__main__":
    raise SystemExit(main())
