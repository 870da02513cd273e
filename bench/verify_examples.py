"""Every example under `allranks verify`: is it equal, and how long does that take?

Each example under data parallelism on two processes, and in two dimensions on four; the command is the user's, in a
process of its own. Two times are told: by the clock, of which some of a busy machine's is waiting, and of the
processor, over all processes of the command (looked at every tenth of a second: the least that it was).

    python bench/verify_examples.py [--examples digits,gan] [--runs 0,1,2] [--quick] [--json]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNS = {
    "--layout ddp --nproc 2": 30.0,
    "--layout dp_replicate=2,dp_shard=2": 60.0,
    "--layout tp=2,dp_shard=2": 60.0,
}
"""How a Task is verified, and in how many seconds on two quiet cores."""
OWN_RUNS = {"--nproc 2": 30.0, "--nproc 4": 60.0}
"""The same of a loop, whose layouts are in its code."""
TASKS: dict[str, tuple[str, ...]] = {
    "contrastive": (),
    "digits": (),
    "fine_tuning": ("task.base=digits",),
    "gan": (),
    "recommender": (),
    "text": ("data.text=*.txt",),
    "vision": (),
    "migrate/data_parallel": (),
    "migrate/hf_trainer": (),
    "migrate/lightning": (),
}
"""With the settings that they need in the folder which `prepare` makes."""
LOOPS = {"own_loop": "verified.py"}
SCRIPTS = {
    "migrate/accelerate": "a script to compare with the one before; its loop is own_loop's, with a scheduler",
    "migrate/ddp_script": "likewise",
}
"""What has no form that verify takes."""
QUICK = (("digits", 0), ("own_loop", 0))
EVERY_SECONDS = 0.1


def prepare(folder: Path) -> None:
    """What examples read: a text, and the run of digits that fine-tuning begins with."""
    (folder / "notes.txt").write_text("it was a dark and stormy night; " * 400)
    words = [str(EXAMPLES / "digits/task.py"), "--layout", "single", "train.epochs=1", "--run", "digits"]
    ran = subprocess.run(command("train", *words), cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def command(*words: str) -> list[str]:
    """`allranks WORDS` with this python."""
    return [sys.executable, "-m", "allranks", *words]


def cases(names: Sequence[str], runs: Sequence[int]) -> list[tuple[str, list[str], float]]:
    """(example, words of verify, seconds that it may take) of each."""
    found = []
    for name in names:
        own = name in LOOPS
        file = EXAMPLES / name / (LOOPS[name] if own else "after.py" if "/" in name else "task.py")
        for run, seconds in [
            list((OWN_RUNS if own else RUNS).items())[i] for i in runs if not own or i < len(OWN_RUNS)
        ]:
            found.append((name, [str(file), *run.split(), *(() if own else TASKS[name])], seconds))
    return found


def verify(name: str, words: list[str], limit: float, folder: Path) -> dict[str, Any]:
    """A row: exit code, seconds by the clock and of the processor, and what it says."""
    with tempfile.TemporaryFile("w+") as told:
        began = time.monotonic()
        process = subprocess.Popen(
            command("verify", *words, "--json"), cwd=folder, stdout=subprocess.PIPE, stderr=told, text=True
        )
        spent: dict[int, float] = {}
        watcher = threading.Thread(target=_watch, args=(process.pid, spent))
        watcher.start()
        out, _ = process.communicate()
        seconds = time.monotonic() - began
        watcher.join()
        told.seek(0)
        lines = told.read().strip().splitlines() or [""]
    return {
        "example": name,
        "run": " ".join(words[1:]),
        "exit_code": process.returncode,
        "seconds": round(seconds, 1),
        "processor_seconds": round(sum(spent.values()), 1),
        "limit": limit,
        "met": seconds <= limit,
        "said": _said(out) if process.returncode in (0, 1, 3) else lines[-1],
    }


def _said(out: str) -> str:
    try:
        verdicts = json.loads(out)["verdicts"]
    except ValueError:
        return "no answer"
    return "equal" if not verdicts else f"{verdicts[0]['what']}: {verdicts[0]['evidence']}"


def _watch(pid: int, spent: dict[int, float]) -> None:
    """Seconds of the processor of each process that began in `pid`, as they were last seen."""
    try:
        first = psutil.Process(pid)
        while first.is_running() and first.status() != psutil.STATUS_ZOMBIE:
            for process in (first, *first.children(recursive=True)):
                try:
                    used = process.cpu_times()
                except psutil.Error:
                    continue
                spent[process.pid] = used.user + used.system
            time.sleep(EVERY_SECONDS)
    except psutil.Error:
        return


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    mark = " " if row["met"] else "!"
    times = f"{row['seconds']:>7.1f}{mark} {row['processor_seconds']:>9.1f} {row['limit']:>6.0f}"
    said = "" if row["exit_code"] == 0 else f"  {row['said']}"
    return f"{row['example']:<22} {row['run']:<56} {row['exit_code']:>4} {times}{said}"


def main() -> None:
    """Verify and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", default=",".join((*TASKS, *LOOPS)))
    parser.add_argument("--runs", default="0,1,2", help="which of the layouts: " + "; ".join(RUNS))
    parser.add_argument("--quick", action="store_true", help="ends within a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = cases(options.examples.split(","), [int(run) for run in options.runs.split(",")])
    if options.quick:
        chosen = [case for name, run in QUICK for case in cases([name], [run])]
    load, rows = [os.getloadavg()[0]], []
    heading = f"{'example':<22} {'verified with':<56} exit seconds  processor  limit"
    print(heading, file=sys.stderr if options.json else sys.stdout, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if any(name == "fine_tuning" or name in ("text", "migrate/hf_trainer") for name, _, _ in chosen):
            prepare(Path(folder))
        for name, words, limit in chosen:
            rows.append(verify(name, words, limit, Path(folder)))
            print(show(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    load.append(os.getloadavg()[0])
    if options.json:
        print(json.dumps({"load_before": load[0], "load_after": load[1], "scripts": SCRIPTS, "rows": rows}))
        return
    print(f"load {load[0]:.1f} before, {load[1]:.1f} after; ! is later than the limit, which is for two quiet cores")
    for name, reason in SCRIPTS.items():
        print(f"{name}: not verified: {reason}")


if __name__ == "__main__":
    main()
