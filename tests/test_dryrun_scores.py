"""bench/dryrun_accuracy.py and what pages say of it: it compares every axis and product, and the figures are stored."""

import importlib
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from allranks.config import resolve_config
from allranks.layout import Layout
from allranks.training.prepare import resolve_layout
from tools import dryrun_scores
from tools.dryrun_scores import RESULTS, configurations, line, section, summary

BENCH = Path(__file__).parents[1] / "bench"
AXES = ("dp", "tp", "cp", "pp", "ep")
Case = tuple[str, int, tuple[str, ...]]


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """What the program compares."""
    monkeypatch.syspath_prepend(str(BENCH))
    found: list[Case] = list(importlib.import_module("dryrun_accuracy").CASES)
    return found


def layout_of(case: Case) -> Layout:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.global_batch=8", *case[2]], layout=case[0])
    return resolve_layout(config, case[1])


def axes_of(layout: Layout) -> set[str]:
    """Those along which it cuts something; experts are cut along data-parallel ranks, which count besides."""
    return {axis for axis in AXES if getattr(layout, axis) > 1}


def test_every_axis_and_every_product_of_two_and_of_three_is_compared(cases: list[Case]) -> None:
    covered = [axes_of(layout_of(case)) for case in cases]
    for number in (1, 2, 3):
        for product in combinations(AXES, number):
            exact = set(product) | ({"dp"} if "ep" in product else set())
            assert exact in covered, product
    kinds = [(layout.dp_replicate > 1, layout.dp_shard > 1) for layout in map(layout_of, cases)]
    assert set(kinds) == {(False, False), (True, False), (False, True), (True, True)}


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_is_compared_with_recomputation_and_with_several_micro_steps(cases: list[Case], axis: str) -> None:
    here = [(layout, case[2]) for case in cases for layout in [layout_of(case)] if getattr(layout, axis) > 1]
    assert {layout.recompute for layout, _ in here} == {"none", "full", "selective"}
    assert any("train.micro_batch=1" in keys for _, keys in here)


def test_no_configuration_is_compared_twice(cases: list[Case]) -> None:
    assert len(set(cases)) == len(cases)


def document(*errors: float, messages: bool = True, listed: int = 1) -> dict[str, Any]:
    """A stored run of one configuration with these ranks."""
    machine = {"date": "2026-11-29T12:00", "commit": "abc", "cores": 2, "torch": "2.13", "python": "3.11"}
    rows = [
        {"layout": "tp=2", "keys": "", "processes": 2, "rank": rank, "real_bytes": 10**9, "error": error}
        | {"messages": messages}
        for rank, error in enumerate(errors)
    ]
    return {"machine": machine | {"load": 1.0, "load_after": 2.0}, "listed": listed, "rows": rows}


def test_the_figures_are_those_of_the_rank_that_is_told_worst() -> None:
    told = document(0.001, -0.013)
    assert "within 2% in 2 of 2 ranks, the furthest -1.30% (`tp=2`)" in summary(told)
    assert "On 2026-11-29, commit `abc`" in summary(told) and "the program lists" not in summary(told)
    assert line(told).startswith(" 2 ranks within 1.30%, messages the same in 2;")
    assert line(told).endswith("| 2% | yes | 2026-11-29 |")
    assert list(section(told))[-1] == "| `tp=2` |  | 2 | 1.0 GB | -1.30% | the same |"


def test_what_misses_or_is_not_all_is_said() -> None:
    assert "within 2% in 1 of 2 ranks" in summary(document(0.0, 0.03))
    assert "| 2% | no |" in line(document(0.0, 0.03)) and "| 2% | no |" in line(document(0.0, messages=False))
    assert list(section(document(0.0, messages=False)))[-1].endswith("**differ** |")
    assert "1 configuration of the 40 that the program lists" in summary(document(0.0, listed=40))


def test_the_stored_run_is_of_what_the_program_compares(cases: list[Case]) -> None:
    stored = json.loads(RESULTS.read_text())
    known = {(layout, " ".join(keys), world) for layout, world, keys in cases}
    assert set(configurations(stored["rows"])) <= known
    assert stored["listed"] == len(cases), "run bench/dryrun_accuracy.py anew"


def test_pages_are_made_of_the_stored_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "dryrun.json"
    other.write_text(json.dumps(document(0.0123)))
    monkeypatch.setattr(dryrun_scores, "RESULTS", other)
    assert "+1.23%" in dryrun_scores.render_rehearse()
    assert "1 ranks within 1.23%" in dryrun_scores.render_measured()
