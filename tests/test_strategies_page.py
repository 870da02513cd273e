"""The page of the strategies: every command runs, every measured figure is from the stored run."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from allranks.benchmarking.strategies import STRATEGIES as MEASURED
from allranks.benchmarking.strategies import is_beside_ddp
from allranks.benchmarking.subject import make_config
from allranks.cli.main import main
from allranks.config_keys import config_keys
from allranks.config_sections import PROCESS_AXES
from allranks.layout import Layout
from allranks.layout_string import parse_layout
from tests.test_documentation import allranks_problems
from tools import strategies
from tools.strategies import NO_TURNS, RESULTS, render_strategies
from tools.strategy_choices import STRATEGIES, Strategy

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "examples" / "digits" / "task.py")
PAGE = ROOT / "docs" / "reference" / "strategies.md"


def stored() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RESULTS.read_text())
    return document


def test_the_page_is_what_the_run_says() -> None:
    assert PAGE.read_text() == render_strategies()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_command_is_accepted(strategy: Strategy, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"| `{strategy.words}` |" in PAGE.read_text()
    words = ["train", DIGITS, *shlex.split(strategy.words)]
    many = ["--nproc", "4"] if "dp_replicate=2,dp_shard=*" in words else []
    many = ["--nproc", "2"] if strategy.layout == "ddp" and strategy.settings else many
    shown = main([*words, *many, "--show", "--json"])
    out, err = capsys.readouterr()
    assert shown == 0, err
    assert json.loads(out)["cut"]["data-parallel ranks"] >= 1


def test_every_axis_and_every_measured_strategy_has_its_place() -> None:
    layouts = " ".join(strategy.layout for strategy in STRATEGIES)
    assert all(f"{axis}=" in layouts for axis in (*PROCESS_AXES, "ep"))
    named = {row for strategy in STRATEGIES for row in strategy.rows}
    assert named == set(MEASURED) == {row["strategy"] for row in stored()["rows"]}
    assert all((ROOT / f"docs/how-to/{strategy.guide}.md").is_file() for strategy in STRATEGIES if strategy.guide)


@pytest.mark.parametrize(
    "key", ["kind", "sharding", "schedule", "recompute", "offload", "compile", "ddp_hook", "context"]
)
def test_every_way_that_a_layout_has_is_on_the_page(key: str) -> None:
    missing = [
        word
        for word in config_keys()[f"layout.{key}"].words
        if word not in ("none", "mesh", "full") and not re.search(rf"[`=]{word}\b", PAGE.read_text())
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/explanation/concepts.md"])
def test_who_starts_elsewhere_finds_them_too(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [
        word for word in ("placement", "slow-links", "save-memory", "pipeline") if f"how-to/{word}.md" not in text
    ] == []


def test_a_row_without_a_ratio_has_its_command_its_reason_and_its_guide() -> None:
    choices, reasons = PAGE.read_text().split("## Measured")[0], PAGE.read_text().split("## Without a ratio")[1]
    assert len({strategy.name for strategy in STRATEGIES}) == len(STRATEGIES)
    for strategy in STRATEGIES:
        assert f"| `{strategy.words}` |" in choices
        assert (f"| `{strategy.name}` | {strategy.why_not} |" in reasons) == bool(strategy.why_not)
        assert not strategy.settings or f"(../how-to/{strategy.guide}.md)" in choices


def test_the_run_says_where_and_how_it_was_made() -> None:
    document = stored()
    program, *words = shlex.split(document["command"])
    assert program == "allranks" and list(allranks_problems(words)) == []
    assert {"date", "torch", "cores", "load"} <= document["machine"].keys()
    assert {row["processes"] for row in document["rows"]} == {1, 2, 4}
    assert all(row["loss_difference"] <= 1e-4 for row in document["rows"])


def rows_beside_ddp(document: dict[str, Any]) -> list[Any]:
    """`of_ddp` of the rows that take turns with ddp."""
    return [
        row["of_ddp"]
        for row in document["rows"]
        if is_beside_ddp(Layout.resolve(parse_layout(row["layout"]), row["processes"]))
    ]


def test_fsdp_is_beside_ddp_where_both_took_turns_and_otherwise_the_page_says_that_they_did_not() -> None:
    document = stored()
    found = rows_beside_ddp(document)
    assert len(found) == 2, "on two processes and on four"
    # Runs say their commit since the days in which they began to take these turns.
    if "commit" in document["machine"]:
        assert None not in found and NO_TURNS not in PAGE.read_text()
    else:
        assert found == [None, None] and NO_TURNS in PAGE.read_text()


def row(strategy: str, processes: int, **values: object) -> dict[str, object]:
    figures = {"ratio": 1.0, "ratio_q1": 0.9, "ratio_q3": 1.1, "ours_ms": 100.0, "ours_bytes": 200_000_000}
    rest: dict[str, object] = {"memory_ratio": 0.99, "loss_difference": 0.0, "turns": 7, "of_ddp": None, "misses": []}
    layout = str(Layout.resolve(parse_layout(strategy), processes))
    return {"strategy": strategy, "layout": layout, "processes": processes, **figures, **rest, **values}


def test_samples_are_those_that_the_stored_run_took() -> None:
    for figures in stored()["rows"]:
        layout = Layout.resolve(parse_layout(figures["layout"]), figures["processes"])
        took = make_config(layout, steps=1).train.global_batch
        assert f"| `{figures['strategy']}` | {figures['processes']} | {took} |" in PAGE.read_text()


def test_figures_are_beside_ddp_on_as_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("single", 1),
        row("ddp", 2),
        row("ddp", 4, ours_ms=50.0, ours_bytes=100_000_000),
        row("fsdp", 4, ours_bytes=40_000_000, ratio=1.04, of_ddp=1.5, misses=["time", "memory", "of_ddp"]),
        row("tp=2,dp_shard=2", 4, ours_bytes=25_000_000),
        row("pp=*", 2, ours_bytes=150_000_000),
        row("ddp,ep=2", 2, ours_bytes=150_000_000),
        row("tp=*", 2, ratio=None, loss_difference=0.01),
        row("placement", 1),
    ]
    results = tmp_path / "strategies.json"
    machine = {"date": "2030-01-02T03:04+00:00", "gpus": [], "cores": 3, "torch": "9.9", "load": 1.5, "load_after": 2.5}
    targets = {"time": 1.03, "memory": 1.02, "of_ddp": 1.25}
    document = {"command": "allranks bench strategies", "machine": machine, "rows": rows, "targets": targets}
    results.write_text(json.dumps(document))
    monkeypatch.setattr(strategies, "RESULTS", results)
    lines = render_strategies().splitlines()
    assert "| `fsdp` | 4 | 8 | **1.040** | 0.90-1.10 | **0.990** | **1.50** | 40.0 MB | 60% |" in lines
    assert "| `single` | 1 | 2 | 1.000 | 0.90-1.10 | 0.990 | - | 200.0 MB | - |" in lines
    assert "| `tp=2,dp_shard=2` | 4 | 4 | 1.000 | 0.90-1.10 | 0.990 | - | 25.0 MB | 75% |" in lines
    assert "| `pp=*` | 2 | 8 | 1.000 | 0.90-1.10 | 0.990 | - | 150.0 MB | 25% |" in lines
    assert "| `ddp,ep=2` | 2 | 4 | 1.000 | 0.90-1.10 | 0.990 | - | 150.0 MB | - |" in lines, "another model than ddp's"
    assert rows_beside_ddp(document) == [1.5] and NO_TURNS not in render_strategies()
    assert "| `tp=*` | 2 | 2 | not timed: the first losses differ by 1e-02 | | | | | |" in lines
    (table,) = (index for index, line in enumerate(lines) if "samples a step |" in line)
    assert len({line.count("|") for line in lines[table : table + 8]}) == 1
    assert not [line for line in lines if line.startswith("| `placement` | 1")]
    assert any(
        "On 2030-01-02: 3 CPU cores" in line
        and "load of 1.5 at the start, 2.5 at the end" in line
        and "7 turns" in line
        for line in lines
    )
