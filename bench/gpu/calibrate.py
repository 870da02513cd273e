"""How near a plan of calibrated figures comes to one GPU: it is calibrated, the bench model planned, and measured.

Each case is the transformer of `one_gpu.py` under `single`, its blocks kept or repeated, and two sizes of a
micro-batch: predicted by `allranks plan --cluster FILE`, where FILE is what `allranks doctor --calibrate` wrote on this
GPU, and by the catalog's figures; measured by `allranks train`, as its report has it.

    python bench/gpu/calibrate.py [--quick] [--steps 30] [--cases 3] [--keep FILE] [--json]
    python bench/gpu/calibrate.py --device cpu --tiny      that the program itself works
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TASK = str(Path(__file__).with_name("language.py")) + ":Language"
CASES = (("none", 4), ("full", 4), ("none", 1))
"""(recompute, samples of a micro-batch); four samples a step."""


def allranks(*words: str, folder: Path, codes: tuple[int, ...] = (0,)) -> Any:
    """What the command says with --json, where nothing is known of this machine and of runs before."""
    command = [sys.executable, "-m", "allranks", *words, "--json"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as configuration:
        kept_apart = {**os.environ, "XDG_CONFIG_HOME": configuration}
        ran = subprocess.run(command, cwd=folder, env=kept_apart, capture_output=True, text=True, check=False)
    print(f"{time.perf_counter() - began:6.1f} s  allranks {' '.join(words)}", file=sys.stderr, flush=True)
    if ran.returncode not in codes:
        raise SystemExit(f"{' '.join(words)}: exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}")
    return json.loads(ran.stdout)


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case: first what needs the device for itself, then the plans, beside each other."""
    file = arguments.keep or folder / "measured.toml"
    quick = ("--quick",) if arguments.quick or arguments.tiny else ()
    allranks("doctor", "--calibrate", "--device", arguments.device, "--nproc", "1", "--output", str(file.resolve()),
             *quick, folder=folder)  # fmt: skip
    kind = f"train.precision={'float32' if arguments.device == 'cpu' else 'bfloat16'}"
    size = "tiny" if arguments.tiny else "1b"
    here = ("--cluster", "1x1:cpu") if arguments.device == "cpu" else ("--cluster", "local", "--gpus", "1")
    known = ("--cluster", str(file.resolve()))
    with ThreadPoolExecutor(8) as pool:
        found = []
        for recompute, micro_batch in CASES[: arguments.cases]:
            layout = f"single,recompute={recompute}"
            keys = (f"task.size={size}", "train.global_batch=4", f"train.micro_batch={micro_batch}", kind)
            run = folder / f"{recompute}-{micro_batch}"
            words = (f"train.steps={arguments.steps}", "--layout", layout, "--nproc", "1", "--device", arguments.device)
            allranks("train", TASK, *keys, *words, "--run", str(run), folder=folder)
            found.append((("plan", TASK, *keys, "--layout", layout), run))
        plans = [
            [pool.submit(allranks, *plan, *cluster, folder=folder, codes=(0, 1)) for cluster in (known, here)]
            for plan, _ in found
        ]
        reports = [pool.submit(allranks, "report", str(run), folder=folder) for _, run in found]
    rows = []
    for (recompute, micro_batch), pair, report in zip(CASES, plans, reports, strict=False):
        calibrated, bare = (plan.result()["best"]["step_seconds"]["expected"] for plan in pair)
        seconds = report.result()["step_seconds"]
        rows.append({
            "recompute": recompute, "micro_batch": micro_batch, "seconds": seconds,
            "calibrated_seconds": calibrated, "uncalibrated_seconds": bare,
            "calibrated_error": calibrated / seconds - 1, "uncalibrated_error": bare / seconds - 1,
        })  # fmt: skip
    return rows


def main() -> int:
    """0, whatever the errors are: this measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--quick", action="store_true", help="doctor --calibrate --quick")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many: each saves 12 GB at its end")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where the measured figures go, to look at")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments)
    error = statistics.mean(abs(row["calibrated_error"]) for row in rows)
    if arguments.json:
        print(json.dumps({"mean_error": error, "rows": rows}))
        return 0
    table = Table("recompute", "micro-batch", "measured ms", "calibrated ms", "error", "catalog ms", "error")
    for row in rows:
        table.add_row(
            row["recompute"], str(row["micro_batch"]), f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['calibrated_seconds']:.1f}", f"{row['calibrated_error']:+.1%}",
            f"{1e3 * row['uncalibrated_seconds']:.1f}", f"{row['uncalibrated_error']:+.1%}",
        )  # fmt: skip
    Console().print(table)
    print(f"mean error of the calibrated plan {error:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
