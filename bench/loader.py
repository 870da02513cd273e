"""The loader beside torch's DataLoader: the same dataset, workers and batch, in one interleaved run.

    python bench/loader.py [--quick] [--json]

Prints samples per second of both and their ratio: the median over rounds in which each draws the same number of batches
in turn. Every other round the two change places, so that neither always comes after the other. `seeding` is what it
costs to give python, numpy and torch a seed of their own before an item that may draw random numbers (law 6); `tiny` is
the time of one step of 2 samples of 32 integers, collating included.
"""

import argparse
import json
import os
import statistics
import sys
import time
import timeit
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.utils.data

from allranks.data.cut import Cut
from allranks.data.loader import Loader
from allranks.data.random_keys import item_key, seed_all
from allranks.data.sources import ByteWindows, standard_library_text
from allranks.data.stream import DataStream


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`length` rows of `width` integers; an item takes at least `seconds`."""

    def __init__(self, width: int, seconds: float = 0.0, length: int = 1_000_000) -> None:
        self.rows = torch.randint(0, 256, (4096, width))
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return {"x": self.rows[index % 4096]}


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison; `batches` are drawn in every turn."""

    name: str
    dataset: Any
    draws: bool
    batch: int
    workers: int
    batches: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    workers: int
    batch: int
    torch_per_second: float
    allranks_per_second: float
    ratio: float


def cases(quick: bool) -> list[Case]:
    """Built-in windows, items of 0.3 ms and cheap items, without and with worker processes."""
    windows = ByteWindows(standard_library_text(), seq=256)
    slow, cheap, tiny = Rows(256, seconds=0.0003), Rows(256), Rows(32)
    workers = [0, 1] if quick else [0, 1, 2]
    return [
        *(Case("built-in windows", windows, False, 32, count, 50) for count in workers),
        *(Case("items of 0.3 ms", slow, True, 32, count, 10) for count in workers),
        *(Case("cheap items, seeded", cheap, True, 32, count, 50) for count in workers),
        *(Case("cheap items, draws=False", cheap, False, 32, count, 50) for count in workers),
        Case("tiny", tiny, False, 2, 0, 2000),
    ]


def draw(batches: Iterator[Any], count: int) -> float:
    """Seconds for the next `count`."""
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return time.perf_counter() - start


def endless(case: Case) -> Iterator[Any]:
    """torch's DataLoader, shuffled, epoch after epoch."""
    loader = torch.utils.data.DataLoader(
        case.dataset,
        batch_size=case.batch,
        shuffle=True,
        num_workers=case.workers,
        persistent_workers=case.workers > 0,
    )
    while True:
        yield from loader


def measure(case: Case, rounds: int) -> Row:
    """The medians over `rounds` in which both draw as many batches."""
    plain = endless(case)
    seconds: dict[str, list[float]] = {"torch": [], "allranks": []}
    stream = DataStream(case.dataset, cut=Cut(case.batch))
    with Loader(stream, workers=case.workers, draws=case.draws) as ours:
        sides: list[tuple[str, Iterator[Any]]] = [("torch", plain), ("allranks", ours)]
        for _, batches in sides:
            draw(batches, max(10, case.batches // 10))
        for turn in range(rounds):
            for name, batches in sides if turn % 2 else sides[::-1]:
                seconds[name].append(draw(batches, case.batches))
    plain.close()  # type: ignore[attr-defined]
    ratio = statistics.median(a / b for a, b in zip(seconds["torch"], seconds["allranks"], strict=True))
    samples = case.batch * case.batches
    speeds = {name: samples / statistics.median(values) for name, values in seconds.items()}
    return Row(case.name, case.workers, case.batch, speeds["torch"], speeds["allranks"], ratio)


def seeding_microseconds() -> float:
    """The cost of one item's seeds."""
    number = 5000
    return min(timeit.repeat(lambda: seed_all(item_key(0, 3, 12345)), number=number, repeat=5)) / number * 1e6


def main() -> None:
    """Measures, and prints the table (and with --json one object on standard output)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output, the table on standard error"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = sys.stderr if arguments.json else sys.stdout
    print(f"torch {torch.__version__}, {os.cpu_count()} cores", file=out)
    print(f"{'':26}workers  batch  torch/s  allranks/s  ratio", file=out)
    rows = []
    for case in cases(arguments.quick):
        row = measure(case, rounds=16 if arguments.quick else 60)
        rows.append(row)
        print(
            f"{row.name:26}{row.workers:7}{row.batch:7}{row.torch_per_second:9.0f}{row.allranks_per_second:12.0f}"
            f"{row.ratio:7.3f}",
            file=out,
        )
    seeding = seeding_microseconds()
    tiny = {"torch": 2e6 / rows[-1].torch_per_second, "allranks": 2e6 / rows[-1].allranks_per_second}
    print(f"seeding: {seeding:.1f} us an item where the dataset draws; draws=False on the dataset saves it", file=out)
    print(f"tiny: {tiny['torch']:.1f} us a step with torch, {tiny['allranks']:.1f} us with allranks", file=out)
    if arguments.json:
        result = {"rows": [asdict(row) for row in rows], "seeding_us": seeding, "tiny_step_us": tiny}
        print(json.dumps(result))


if __name__ == "__main__":
    main()
