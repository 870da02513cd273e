"""Microseconds of the processor that one configuration takes the planner, after the model's profile is made.

    python bench/plan_speed.py [--quick] [--json]

Every combination of degrees, micro-batch, recompute and schedule of a 405-billion model on 16,384 devices; each is new
to the planner, whose caches hold what configurations share, as they do in a search.
"""

import argparse
import itertools
import json
import statistics
import time

from allranks.layout import Layout
from allranks.named_models import find_model
from allranks.plan import Choice
from allranks.planning.estimate import estimate
from allranks.planning.hardware import find_cluster


def choices(devices: int, quick: bool) -> list[Choice]:
    """Distinct configurations of `devices`."""
    found = []
    degrees = itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8, 16), (1, 2, 4), ("none", "selective", "full"))
    for tp, cp, pp, micro_batch, recompute in degrees:
        for schedule in ("1f1b", "interleaved") if pp > 1 else ("1f1b",):
            shard = min(512, devices // (tp * cp * pp))
            layout = Layout(
                dp_replicate=devices // (tp * cp * pp * shard), dp_shard=shard, tp=tp, cp=cp, pp=pp, schedule=schedule,
                recompute=recompute,
            )  # fmt: skip
            found.append(Choice(layout, 16384, micro_batch, chunks=layout.num_stages // layout.pp))
    return found[:: 5 if quick else 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    profile, cluster = find_model("llama3-405b").profile(8192), find_cluster("2048x8:h100")
    tried = choices(cluster.num_devices, arguments.quick)
    estimate(profile, cluster, tried[0])
    seconds, busy = [], time.process_time()
    for choice in tried:
        start = time.perf_counter()
        estimate(profile, cluster, choice)
        seconds.append(time.perf_counter() - start)
    figures = {
        "configurations": len(seconds),
        "mean_us": (time.process_time() - busy) / len(tried) * 1e6,
        "median_us": statistics.median(seconds) * 1e6,
        "worst_us": max(seconds) * 1e6,
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<16}{value:>10.0f}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
