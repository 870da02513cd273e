"""What each precision costs on this device: a layer's forward and backward beside the same in float32.

    python bench/precision.py [--device cpu|cuda] [--size N] [--quick] [--json]

The products of a linear layer are nearly all the time of a large model, and whether a processor has instructions for a
type decides how long they take. Types take turns; the shortest of several turns counts, since other programs only ever
make one longer.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext

import torch
from torch import nn

TYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
TURNS = 7


def measure(name: str, device: torch.device, size: int) -> float:
    """Seconds of a forward and a backward of `size` rows through a layer of `size` by `size`."""
    compute = TYPES[name]
    layer = nn.Linear(size, size, bias=False, device=device)
    rows = torch.randn(size, size, device=device)
    if compute is torch.float64:
        layer, rows = layer.double(), rows.double()
    lowered = compute in (torch.bfloat16, torch.float16)
    start = time.perf_counter()
    with torch.autocast(device.type, compute) if lowered else nullcontext():
        output = layer(rows)
    output.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measures, and prints the table (and with --json one object on standard output)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=512, help="rows, and width of the layer")
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output, the table on standard error"
    )
    arguments = parser.parse_args()
    device, size = torch.device(arguments.device), 256 if arguments.quick else arguments.size
    torch.set_num_threads(1)
    best = dict.fromkeys(TYPES, float("inf"))
    for turn in range(2 if arguments.quick else TURNS):
        for name in TYPES:
            seconds = measure(name, device, size)
            best[name] = min(best[name], seconds) if turn or device.type == "cpu" else best[name]
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{size} x {size} x {size} on {device}, one thread, torch {torch.__version__}", file=out)
    for name, seconds in best.items():
        print(f"{name:10}{1000 * seconds:10.2f} ms{seconds / best['float32']:8.2f} times float32", file=out)
    if arguments.json:
        rows = {name: {"seconds": seconds, "of_float32": seconds / best["float32"]} for name, seconds in best.items()}
        print(json.dumps({"device": str(device), "size": size, "torch": torch.__version__, "types": rows}))


if __name__ == "__main__":
    main()
