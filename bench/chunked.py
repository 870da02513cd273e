"""Peak memory and time of cross-entropy over a large vocabulary: whole logits, and in chunks.

    python bench/chunked.py [--positions N] [--vocabulary N] [--channels N] [--chunk N] [--quick] [--json]

Each is measured in a process of its own: the highest resident memory of one forward and backward, less what stood there
before it (Linux: VmHWM, put back by /proc/self/clear_refs), and the shortest of three.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

from allranks.losses import chunked_cross_entropy

KINDS = ("whole", "chunked")
MIB = 2**20


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(kind: str, positions: int, vocabulary: int, channels: int, chunk: int) -> dict[str, float]:
    """Bytes and seconds, in this process."""
    torch.set_num_threads(1)
    hidden = torch.randn(positions, channels, requires_grad=True)
    weight = torch.randn(vocabulary, channels).mul_(0.02).requires_grad_()
    targets = torch.randint(vocabulary, (positions,))
    seconds, num_bytes = [], 0
    for _ in range(3):
        hidden.grad = weight.grad = None
        Path("/proc/self/clear_refs").write_text("5")
        before, start = resident("VmRSS"), time.perf_counter()
        if kind == "whole":
            loss = functional.cross_entropy(functional.linear(hidden, weight), targets, reduction="sum")
        else:
            loss = chunked_cross_entropy(hidden, weight, targets, chunk=chunk)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        num_bytes = max(num_bytes, resident("VmHWM") - before)
    return {"bytes": num_bytes, "seconds": min(seconds)}


def main() -> None:
    """Measures, and prints the table (and with --json one object on standard output)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output, the table on standard error"
    )
    given = parser.parse_args()
    sizes = (1024, 8192, 64, 128) if given.quick else (given.positions, given.vocabulary, given.channels, given.chunk)
    if given.only:
        print(json.dumps(measure(given.only, *sizes)))
        return
    out = sys.stderr if given.json else sys.stdout
    print("{} positions, vocabulary {}, {} channels, chunks of {}, float32, one thread".format(*sizes), file=out)
    named = zip(("--positions", "--vocabulary", "--channels", "--chunk"), map(str, sizes), strict=True)
    arguments = [part for pair in named for part in pair]
    rows = {}
    for kind in KINDS:
        command = [sys.executable, __file__, "--only", kind, *arguments]
        rows[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row = rows[kind]
        print(f"{kind:10}{row['bytes'] / MIB:9.0f} MiB{row['seconds']:9.2f} s", file=out, flush=True)
    if given.json:
        print(json.dumps({"sizes": sizes, "rows": rows}))


if __name__ == "__main__":
    main()
