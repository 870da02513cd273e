"""The planner's memory beside the dry run's, category by category, for layouts on every axis.

    python bench/planned_memory.py [--json] [--only WORD]

Both say what the fullest rank of one model holds at its fullest moment: the planner from formulas, the dry run by
running the step on tensors without memory. Neither needs a device; nothing is timed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from allranks.cli.rehearsed_question import Asked, choice_of, profile_of, question_of
from allranks.planning.estimate import estimate
from allranks.rehearsing.dryrun import WORKSPACE_BYTES
from allranks.rehearsing.whole import rehearse
from allranks.units import format_bytes

CLUSTER = "1x8:h200"
MODEL = ("llama3-8b", "task.layers=8", "task.seq=4096")
EXPERTS = ("mixtral-8x7b", "task.layers=8", "task.seq=4096")
FULL, SELECTIVE, GRAD_OP = "recompute=full", "recompute=selective", "sharding=grad_op"
CASES: tuple[tuple[str, int, int], ...] = (  # layout, samples of a forward, of a step
    ("ddp", 1, 8), ("ddp", 2, 32), (f"ddp,{FULL}", 1, 16), (f"ddp,{SELECTIVE}", 1, 8), ("fsdp", 1, 8), ("fsdp", 4, 64),
    (f"fsdp,{FULL}", 1, 8), (f"fsdp,{GRAD_OP}", 1, 16), ("dp_shard=8,sharding=optimizer", 1, 8),
    ("dp_replicate=2,dp_shard=4", 1, 8), ("tp=8", 1, 1), (f"tp=8,{FULL}", 4, 4), ("tp=2,dp_shard=4", 1, 8),
    ("cp=2,dp_shard=4", 1, 8), ("dp_shard=2,tp=2,cp=2", 1, 2), ("pp=4,dp_shard=2", 1, 16),
    ("pp=4,dp_replicate=2", 1, 16), (f"pp=2,tp=2,dp_shard=2,{FULL}", 1, 8),
)  # fmt: skip
OF_EXPERTS = (
    ("dp_shard=8,ep=4", 1, 8), ("dp_replicate=8,ep=8", 1, 8), (f"dp_shard=8,ep=2,{FULL}", 1, 8),
    ("dp_shard=4,tp=2,ep=4", 1, 4), (f"dp_shard=2,tp=4,{SELECTIVE}", 1, 4),
)  # fmt: skip
PRECISIONS = ("bfloat16", "float32")
UNEXPLAINED = 0.03


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration; error: planned by counted, less one; both by category in bytes."""

    model: str
    precision: str
    layout: str
    micro_batch: int
    global_batch: int
    counted_bytes: float
    planned_bytes: float
    error: float
    counted: dict[str, float]
    planned: dict[str, float]


def compare(model: tuple[str, ...], precision: str, layout: str, micro_batch: int, global_batch: int) -> Row:
    """One configuration by both."""
    batch = (f"train.micro_batch={micro_batch}", f"train.global_batch={global_batch}")
    question = question_of(Asked((*model, f"train.precision={precision}", *batch), CLUSTER, layout, "kinds"))
    ranks = rehearse(question).ranks.values()
    told = max(ranks, key=lambda rank: rank.peak_bytes)
    memory = estimate(profile_of(question), question.cluster, choice_of(question)).memory
    planned = {name: num_bytes for name, num_bytes in asdict(memory).items() if num_bytes and name != "framework"}
    total = memory.total - memory.framework + WORKSPACE_BYTES  # which the dry run counts by itself
    return Row(
        model[0], precision, layout, micro_batch, global_batch, told.peak_bytes, total,
        total / told.peak_bytes - 1, dict(told.by_category), planned,
    )  # fmt: skip


def rows(only: str) -> Iterator[Row]:
    """All configurations whose layout has `only` in it."""
    for model, cases, precisions in ((MODEL, CASES, PRECISIONS), (EXPERTS, OF_EXPERTS, PRECISIONS[:1])):
        for precision in precisions:
            for layout, micro_batch, global_batch in cases:
                if only in layout:
                    print(f"{model[0]} {precision} {layout}", file=sys.stderr)
                    yield compare(model, precision, layout, micro_batch, global_batch)


def print_rows(found: list[Row]) -> None:
    """One line a configuration, and the largest difference of a category."""
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "precision", "layout", "batch", "counted", "planned", "error"):
        table.add_column(
            heading, no_wrap=True, justify="right" if heading in ("counted", "planned", "error") else "left"
        )
    for row in found:
        sizes = format_bytes(row.counted_bytes), format_bytes(row.planned_bytes), f"{row.error:+.1%}"
        table.add_row(row.model, row.precision, row.layout, f"{row.micro_batch} of {row.global_batch}", *sizes)
    Console(width=140, highlight=False).print(table)
    worst = max((abs(row.error) for row in found), default=0.0)
    near = sum(abs(row.error) <= UNEXPLAINED for row in found)
    print(f"{near} of {len(found)} within {UNEXPLAINED:.0%}; the largest error is {worst:.1%}")


def main() -> None:
    """Compare, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document, with the categories")
    parser.add_argument("--only", default="", help="layouts that have this word in them")
    options = parser.parse_args()
    found = list(rows(options.only))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in found]}, indent=2))
    else:
        print_rows(found)


if __name__ == "__main__":
    main()
