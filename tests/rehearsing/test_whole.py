"""A whole dry run: the ranks that were asked for, a margin on GPUs, and what is not rehearsed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from allranks.layout import Layout
from allranks.layout_string import parse_layout
from allranks.planning.hardware import find_cluster
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing.whole import CONTEXT_BYTES, Question, fragment_bytes, rehearse
from tests.rehearsing.tasks import Tokens, configured


def question(cluster: str, layout: str, *ranks: int, layers: int = 3) -> Question:
    task, found = Tokens(layers=layers), find_cluster(cluster)
    config, spread = configured(task, layout, found.num_devices)
    return Question("tokens", task, config, found, spread, ranks)


@pytest.mark.full
def test_on_gpus_there_is_a_margin() -> None:
    lines: list[str] = []
    told = rehearse(question("2x2:a100-80g", "fsdp", 0, 3, layers=7), lines.append)
    assert list(told.ranks) == [0, 3] and lines == ["rank 0 of 4", "rank 3 of 4"]
    assert told.capacity_bytes < 80e9 * 1.1
    assert told.margin_bytes > CONTEXT_BYTES
    assert told.findings == () and not told.fails and told.free_bytes > 0
    for what in ("kernels of CUDA", "devices", "NCCL", "values", "speed"):
        assert any(line.startswith(f"{what}: ") for line in told.unrehearsed)
    assert told.unrehearsed[-1] == "ranks other than 0, 3: whether they take the same way (--ranks all)"
    assert told.decisions == (
        "4 of 7 blocks were traced, because blocks of one kind do the same; --full-trace traces all",
    )


MEASURED = json.loads((Path(__file__).parents[2] / "bench/results/gpu.json").read_text())["memory"]


def told_of(row: dict[str, Any], rank: RankRehearsal) -> RankRehearsal:
    """A rehearsal with the peak of that row."""
    coming = {"activations": row["coming_bytes"]}
    return dataclasses.replace(rank, peak_bytes=row["predicted_bytes"], by_category=coming)


def test_what_a_gpu_has_allocated_and_reserved_was_told() -> None:
    """Rows of `bench/dryrun_accuracy.py --device cuda`. Of a small model the steps of 2 MB and 20 MB outweigh all."""
    some = rehearse(question("1x2:cpu", "ddp", 0)).ranks[0]
    for row in MEASURED:
        layout = Layout.resolve(parse_layout(row["layout"]), 1)
        margin = fragment_bytes(told_of(row, some), layout)
        assert abs(row["predicted_bytes"] / row["real_bytes"] - 1) < (0.001 if row["model"] == "1b" else 0.05), row
        assert row["reserved_bytes"] < row["predicted_bytes"] + margin + 2e6, row
        assert margin < 0.2 * row["predicted_bytes"], "what fits with a fifth to spare is not refused"
    assert len(MEASURED) >= 7


def test_on_a_processor_there_is_none() -> None:
    told = rehearse(question("1x2:cpu", "ddp", 0))
    assert told.margin_bytes == 0
    assert told.decisions == ()
    assert [line.partition(":")[0] for line in told.unrehearsed][:2] == ["values", "speed"]
    assert told.unrehearsed[-1].startswith("ranks other than rank 0:")


@pytest.mark.parametrize(("device", "said"), [("a100-80g", 200e9), ("a800", None)])
def test_what_waits_on_the_vendors_host_is_held_to_it_and_said(device: str, said: float | None) -> None:
    told = rehearse(question(f"1x2:{device}", "fsdp,offload=parameters", 0))
    assert told.host_capacity_bytes == said
    note = "each host is taken to have 500.0 GB, because the catalog's node of a100-80g has as much for as many devices"
    assert any(one.startswith(note) for one in told.decisions) is (said is not None)


def test_a_rank_that_is_rehearsed_is_not_said_to_be_none() -> None:
    assert not any("--ranks" in line for line in rehearse(question("1x2:cpu", "ddp", 0, 1)).unrehearsed)
