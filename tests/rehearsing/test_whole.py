"""A whole dry run: the ranks that were asked for, a margin on GPUs, and what is not rehearsed."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.layout import Layout
from allranks.planning.hardware import find_cluster
from allranks.planning.room import shared_with_host, usable_bytes
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.rehearsing.named import Named
from allranks.rehearsing.whole import CONTEXT_BYTES, Question, fragment_bytes, margin_bytes, process_bytes, rehearse
from allranks.training.prepare import resolve_layout
from tests.rehearsing.tasks import Tokens, configured, rehearsed
from tests.test_rehearsal import rank


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


def test_the_margin_is_that_of_the_rank_that_needs_most_with_its_own() -> None:
    """The second one has the smaller peak, and more of it comes and goes."""
    ranks = [
        replace(rank(0, 1000), by_category={"weights": 900, "activations": 100}),
        replace(rank(1, 950), by_category={"weights": 50, "activations": 900}),
    ]
    assert margin_bytes(ranks, Layout()) == pytest.approx(CONTEXT_BYTES + 950 + 0.12 * 900 - 1000)
    assert margin_bytes(ranks[:1], Layout()) == pytest.approx(CONTEXT_BYTES + 0.12 * 100)


BENCH = Path(__file__).parents[2] / "bench"
MEASURED: list[dict[str, Any]] = json.loads((BENCH / "results/gpu.json").read_text())["memory"]
"""Rows of `bench/dryrun_accuracy.py --device cuda`: what an H200's allocator said."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=" ".join((row["model"], row["layout"], row["keys"])), marks=() if small else pytest.mark.full
        )
        for row in MEASURED
        for small in [row["model"] == "transformer"]
    ],
)
def test_what_a_gpu_has_allocated_and_reserved_is_told(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a dry run of today. Of a small model the steps of 2 MB and 20 MB in which a GPU is asked outweigh all."""
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("dryrun_accuracy")
    config = bench.config_of(row["layout"], tuple(row["keys"].split()))
    layout = resolve_layout(config, 1)
    told = rehearse_rank(bench.subject(row["model"]), config, World(layout, 1, on_cuda=True), row["rank"])
    assert told.peak_bytes == pytest.approx(row["real_bytes"], rel=0.01 if row["model"] == "1b" else 0.05)
    margin = fragment_bytes(told, layout)
    assert row["reserved_bytes"] < told.peak_bytes + margin + 2e6
    assert margin < 0.2 * told.peak_bytes, "what fits with a fifth to spare is not refused"


def test_what_a_gpu_was_asked_is_kept() -> None:
    assert len(MEASURED) >= 7 and {row["model"] for row in MEASURED} == {"transformer", "1b"}


def test_on_a_processor_it_is_the_process_and_the_system_has_its_part() -> None:
    asked = question("1x2:cpu", "ddp", 0)
    told, device = rehearse(asked), asked.cluster.device
    assert told.margin_bytes == device.context_bytes and told.capacity_bytes == usable_bytes(device)
    assert told.decisions == (shared_with_host(asked.cluster),)
    assert [line.partition(":")[0] for line in told.unrehearsed][:5] == [
        *("values", "speed", "batches other than the first", "samples", "what is no part of a step"),
    ]
    assert told.unrehearsed[-1].startswith("ranks other than rank 0:")


def test_windows_that_are_not_rehearsed_are_said(tmp_path: Path) -> None:
    """But for samples that are no longer than a window."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 32, "vocab_size": 32, "sliding_window": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma2", **sizes}))
    for seq in (8, 16):
        task, found = Named(name=str(path), seq=seq), find_cluster("1x2:cpu")
        config, spread = configured(task, "ddp", 2)
        told = rehearse(Question("gemma2", task, config, found, spread, (0,)))
        said = "1 of 2 layers attend to windows of 8 positions, and are rehearsed with full attention"
        assert any(one.startswith(said) for one in told.decisions) is (seq > 8), told.decisions


def test_a_process_of_which_nobody_knows_takes_what_one_on_a_gpu_does() -> None:
    device = find_cluster("1x2:cpu").device
    assert process_bytes(replace(device, context_bytes=3e8)) == 3e8
    assert process_bytes(replace(device, context_bytes=None)) == CONTEXT_BYTES


@pytest.mark.sample(2)
@pytest.mark.parametrize(("device", "said"), [("a100-80g", 200e9), ("a800", None)])
def test_what_waits_on_the_vendors_host_is_held_to_it_and_said(device: str, said: float | None) -> None:
    told = rehearse(question(f"1x2:{device}", "fsdp,offload=parameters", 0))
    assert told.host_capacity_bytes == said
    note = "each host is taken to have 500.0 GB, because the catalog's node of a100-80g has as much for as many devices"
    assert any(one.startswith(note) for one in told.decisions) is (said is not None)


class Streamed:
    """Samples in their order."""

    order = "global"

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Growing(Tokens):
    """Sequences of 32 tokens, but for those of the first step: they are as long as `first`."""

    first: int = 16

    def dataset(self, split: str) -> Any:
        rows = super().dataset(split) or []
        short = [{name: row[: self.first] for name, row in one.items()} for one in rows[:8]]
        return Streamed([*short, *rows[8:]]) if rows else None


def test_the_batch_of_the_first_step_is_the_one_that_is_rehearsed() -> None:
    """The later ones are alike in both, and would take what the second one takes."""
    short, long = (rehearsed(Growing(first=length), "single", 1) for length in (16, 32))
    assert short.peak_bytes < 0.75 * long.peak_bytes


def test_a_rank_that_is_rehearsed_is_not_said_to_be_none() -> None:
    assert not any("--ranks" in line for line in rehearse(question("1x2:cpu", "ddp", 0, 1)).unrehearsed)


@pytest.mark.full
def test_the_broadcast_that_only_gpus_make_is_said_to_be_left_out() -> None:
    def says(cluster: str, layout: str) -> bool:
        return any(line.startswith("tp: the broadcast") for line in rehearse(question(cluster, layout, 0)).unrehearsed)

    assert says("1x2:a100-80g", "tp=2") and not says("1x2:a100-80g", "ddp") and not says("1x2:cpu", "tp=2")


@pytest.mark.parametrize("mode", ["none", "block"])
def test_what_compiling_changes_is_said_not_to_be_counted(mode: str) -> None:
    told = rehearse(question("1x2:cpu", f"ddp,compile={mode}", 0))
    assert any("blocks run uncompiled" in line for line in told.decisions) == (mode == "block")
