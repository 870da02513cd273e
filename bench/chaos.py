"""Many real kills: trials of `allranks chaos` in parts that can be resumed, and what a fault point costs when off.

    python bench/chaos.py [--kills 1000] [--part 25] [--points '*'] [--seed 0] [--nproc 2] [--folder DIR] [--json]

Each part is one `allranks chaos` with the next seed: the real command on a tiny task under DDP, checkpoints every five
steps, an evaluation every ten. Its document is kept as DIR/part-SEED.json; a part that is there is not run again, so an
interrupted program goes on where it was. Prints how many kills happened, were recovered from, and left the end bitwise
equal to the undisturbed run, and the seconds from a kill to the next finished step.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

from allranks import fault_points

TASK = Path(__file__).resolve().parents[1] / "tests" / "programs" / "points.py"
POINTS_A_STEP = 6  # data.next, forward, backward, agreement, optimizer, and begin_step
STEPS_A_KILL = 4


def nanoseconds_when_off() -> float:
    """What one point costs a program that nobody breaks, of a core's time; the least of several rounds."""
    fault_points.join({}, 0)
    number = 1_000_000
    program = 'reach("forward")'
    names = {"reach": fault_points.reach}
    rounds = timeit.repeat(program, globals=names, timer=time.process_time, number=number, repeat=5)
    return min(rounds) / number * 1e9


def run_part(seed: int, kills: int, points: str, nproc: int, folder: Path) -> dict[str, Any]:
    """One trial; its evidence stays where something did not hold."""
    document = folder / f"part-{seed}.json"
    if document.exists():
        kept: dict[str, Any] = json.loads(document.read_text())
        return kept
    trial = folder / f"trial-{seed}"
    shutil.rmtree(trial, ignore_errors=True)
    train = (f"train.steps={STEPS_A_KILL * kills}", "train.global_batch=8", "evaluate.every=10", "checkpoint.every=5")
    command = [sys.executable, "-m", "allranks", "chaos", str(TASK), *train, "track.tensorboard=false"]
    command += ["--kills", str(kills), "--seed", str(seed), "--points", points, "--layout", "ddp", "--json"]
    command += ["--nproc", str(nproc), "--run", str(trial)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if not ran.stdout:
        raise SystemExit(f"seed {seed}: {ran.stderr}")
    found: dict[str, Any] = json.loads(ran.stdout)
    if "error" in found:
        raise SystemExit(found["error"])
    temporary = document.with_suffix(".tmp")
    temporary.write_text(ran.stdout)
    temporary.replace(document)
    if ran.returncode == 0:
        shutil.rmtree(trial)
    return found


def summary(parts: list[dict[str, Any]], kills: int) -> dict[str, Any]:
    """All parts in one."""
    incidents = [incident for part in parts for incident in part["incidents"]]
    alone = [one["seconds"] for one in incidents if one["recovery"] == "restarted" and one["seconds"] is not None]
    equal = [part for part in parts if any(one["name"] == "I1" and one["holds"] for one in part["invariants"])]
    broken = [f"seed {seed}: {part['verdict']}" for seed, part in enumerate(parts) if part["exit_code"]]
    places: dict[str, int] = {}
    for incident in incidents:
        place = f"{incident['point']}:{incident['kind']}"
        places[place] = places.get(place, 0) + 1
    return {
        "kills": kills,
        "happened": len(incidents),
        "recovered": sum(one["recovered"] for one in incidents),
        "parts": len(parts),
        "parts_bitwise_equal": len(equal),
        "not_held": broken,
        "median_seconds": round(statistics.median(alone), 3) if alone else None,
        "worst_seconds": round(max(alone), 3) if alone else None,
        "places": dict(sorted(places.items())),
    }


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--part", type=int, default=25, help="kills in one run")
    parser.add_argument("--points", default="*", help="as `allranks chaos --points`")
    parser.add_argument("--seed", type=int, default=0, help="of the first part")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keeps the parts, to go on later")
    parser.add_argument("--quick", action="store_true", help="5 kills")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    kills = 5 if chosen.quick else chosen.kills
    with tempfile.TemporaryDirectory() as name:
        folder = chosen.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        parts = []
        for index, begin in enumerate(range(0, kills, chosen.part)):
            number = min(chosen.part, kills - begin)
            parts.append(run_part(chosen.seed + index, number, chosen.points, chosen.nproc, folder))
            done = summary(parts, kills)
            print(f"{done['recovered']} of {done['happened']} recovered, {kills} wanted", file=sys.stderr, flush=True)
    cost = nanoseconds_when_off()
    result = summary(parts, kills) | {"point_off_nanoseconds": round(cost, 1)}
    result["step_off_microseconds"] = round(cost * POINTS_A_STEP / 1e3, 3)
    if chosen.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:>22}  {value}")


if __name__ == "__main__":
    main()
