"""What the page of measurements says of plans on this machine: it follows from the stored run, which today's planner
still predicts."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import allranks
from tools import local_plans
from tools.dryrun_scores import MEASURED
from tools.local_plans import RESULTS, beyond, goals, line, render_local, section, stored, unmet

ROOT = Path(__file__).parents[1]
TWO, FOUR = "on 2 processes", "on 4 processes"
NOT_MET = {
    f"step time {TWO}, both models", f"step time {TWO}, transformer", f"choice {TWO}, transformer",
    f"choice {FOUR}, transformer",
}  # fmt: skip
"""The goals that the stored run does not meet, or does not judge."""
BEYOND = {
    "perceptron pp=2,schedule=gpipe of 32", "perceptron tp=2 of 128", "transformer cp=2,context=ulysses of 4",
    "transformer dp_replicate=2 of 1", "transformer dp_replicate=2 of 2",
    "transformer dp_replicate=2,recompute=full of 2", "transformer dp_shard=2 of 1",
    "transformer dp_shard=2,recompute=full of 2", "transformer dp_shard=2,sharding=grad_op of 2",
    "transformer dp_shard=2,sharding=optimizer of 2", "transformer pp=2 of 1", "transformer pp=2 of 2",
    "transformer pp=2,schedule=dualpipev of 1", "transformer pp=2,schedule=gpipe of 1", "transformer tp=2 of 4",
}  # fmt: skip
"""Of a run that is not quick: its layouts on two processes whose step is predicted more than 15% wrong."""
NEAR = 1e-3
"""Predictions of another torch's trace may differ by rounding; a planner that predicts otherwise, differs by more."""


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/local_predictions.py."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("local_predictions")


def test_the_stored_run_meets_the_goals_but_for_those_named_here() -> None:
    document = stored()
    assert document["goals"] == {"error": 0.15, "slower": 0.05}
    assert set(unmet(document)) == NOT_MET
    assert document["quick"] or set(beyond(document)) == BEYOND


def test_the_stored_run_is_of_the_layouts_that_the_program_lists(predictions: Any) -> None:
    cases, document = importlib.import_module("local_cases"), stored()
    assert set(document["clusters"]) == {"2", "4"}
    refused = {(one["processes"], one["model"], one["layout"]) for one in document["refused"]}
    measured = {(row["processes"], row["model"], row["layout"], row["micro_batch"]) for row in document["rows"]}
    for number in (2, 4):
        listed, _ = cases.plan_cases(number, document["quick"])
        wanted = {(number, case.model, case.layout, case.micro_batch) for case in listed}
        assert {one for one in wanted - measured if one[:3] not in refused} == set(), "run bench/plan_local.py anew"


def test_the_stored_rows_add_up() -> None:
    document = stored()
    for row in document["rows"]:
        assert len(row["turns_ms"]) == document["turns"] and min(row["turns_ms"]) > 0
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
        assert row["predicted_ms"] == pytest.approx(sum(row["parts_ms"].values()))
    for number, mean in document["mean_error"].items():
        errors = [abs(row["error"]) for row in document["rows"] if row["processes"] == int(number)]
        assert mean == pytest.approx(sum(errors) / len(errors))


def test_the_planner_of_today_predicts_and_chooses_what_is_stored(predictions: Any) -> None:
    document, again = stored(), "python bench/plan_local.py --repredict bench/results/plan_local.json"
    now = predictions.repredict(document)
    for before, row in zip(document["rows"], now["rows"], strict=True):
        assert {**row, "predicted_ms": 0, "error": 0, "parts_ms": 0} == {
            **before, "predicted_ms": 0, "error": 0, "parts_ms": 0, "turns_ms": tuple(before["turns_ms"]),
        }  # fmt: skip
        assert row["predicted_ms"] == pytest.approx(before["predicted_ms"], rel=NEAR), again
    chosen = [one["chosen"] for one in document["choices"]]
    assert [one["chosen"] for one in now["choices"]] == chosen, again
    for one, choice in zip(document["choices"], chosen, strict=True):
        own = [row for row in now["rows"] if (row["processes"], row["model"]) == (one["processes"], one["model"])]
        taken = [row for row in own if all(row[name] == choice[name] for name in choice)]
        assert not taken or taken[0]["predicted_ms"] == pytest.approx(min(row["predicted_ms"] for row in own), rel=NEAR)


@pytest.mark.parametrize(("number", "model"), [(2, "transformer"), (4, "perceptron")])
def test_the_command_chooses_what_is_stored(predictions: Any, tmp_path: Path, number: int, model: str) -> None:
    file, document = tmp_path / "local.toml", stored()
    file.write_text(document["clusters"][str(number)])
    words = importlib.import_module("local_cases").plan_command(model, str(file))
    best = json.loads(allranks(*words[1:], "--json", folder=ROOT).stdout)["best"]
    (choice,) = (one for one in document["choices"] if (one["processes"], one["model"]) == (number, model))
    assert (best["layout"], best["micro_batch"]) == (choice["chosen"]["layout"], choice["chosen"]["micro_batch"])


def document(error: float = 0.1, slower: float | None = 0.0, quick: bool = False, rows: int = 10) -> dict[str, Any]:
    """A stored run: `rows` layouts of each model on two and on four processes, the first chosen, the last the best."""
    machine = {"date": "2026-11-30T12:00", "commit": "abc", "cores": 2, "torch": "2.13", "python": "3.11"}
    sizes, models = (2, 4), ("transformer", "perceptron")
    made = [
        {"processes": size, "model": model, "layout": f"dp_shard={size}", "context": "ulysses", "micro_batch": batch}
        | {"predicted_ms": 100 * (1 + error), "measured_ms": 100.0, "error": error, "busy_ms": 50.0}
        for size in sizes
        for model in models
        for batch in range(rows)
    ]
    first, last = ({"layout": "dp_shard=2", "context": "ulysses", "micro_batch": batch} for batch in (0, rows - 1))
    choices = [
        {"processes": size, "model": model, "slower": slower, "chosen": first, "best": last}
        for size in sizes
        for model in models
    ]
    means = {"mean_error": {"2": abs(error), "4": abs(error)}, "mean_busy_error": {"2": 0.01, "4": 0.02}}
    about = {"machine": machine | {"load": 1.0, "load_after": 2.0}, "quick": quick, "turns": 7, "refused": []}
    predicted = {"date": "2026-11-30T12:00", "commit": "abc"}
    limits = {"error": 0.15, "slower": 0.05}
    return {**about, **means, "predicted": predicted, "goals": limits, "choices": choices, "rows": made}


def test_a_whole_run_within_the_goals_meets_them() -> None:
    told = document(error=-0.15, slower=0.05)
    assert unmet(told) == [] and beyond(told) == [] and {goal.met for goal in goals(told)} == {True}
    assert line(told).endswith("| 15% on 2; at most 5% slower | yes | 2026-11-30 |")
    assert "error 15.0% on 2 and 15.0% on 4 processes; the chosen layout at most 5.0% slower" in line(told)


def test_what_misses_is_named() -> None:
    told = document(error=0.16)
    assert unmet(told) == [f"step time {TWO}, {which}" for which in ("both models", "transformer", "perceptron")]
    assert "| not: step time on 2 processes, both models; " in line(told)
    lines = list(section(told))
    assert "| step time on 2 processes, transformer | 15% | 16.0% | **no** |" in lines
    assert any("20 of 20 layouts are beyond 15%" in one for one in lines) and len(beyond(told)) == 20
    assert "| 2 | transformer | `dp_shard=2` | 0 | 116.0 | 100.0 | **+16.0%** | 50.0 | chosen |" in lines
    assert "| 2 | perceptron | `dp_shard=2` | 9 | 116.0 | 100.0 | **+16.0%** | 50.0 | best |" in lines
    assert "| 4 | transformer | `dp_shard=4` | 0 | 116.0 | 100.0 | +16.0% | 50.0 |  |" in lines
    slow = document(slower=0.051)
    assert unmet(slow) == [f"choice {where}, {which}" for where in (TWO, FOUR) for which in local_plans.MODELS]


def test_a_quick_run_judges_nothing_and_says_so() -> None:
    told = document(quick=True)
    assert len(unmet(told)) == len(goals(told)) == 7 and {goal.met for goal in goals(told)} == {None}
    assert local_plans.QUICK in section(told) and local_plans.QUICK not in section(document())
    assert line(told).startswith(" not measured yet on this source: a quick run") and "| not judged |" in line(told)
    wrong = list(section(document(error=0.5, quick=True)))
    assert any("| +50.0% |" in one for one in wrong) and not any("beyond" in one for one in wrong)


def test_too_few_layouts_or_a_choice_that_was_not_measured_meet_nothing() -> None:
    few = unmet(document(rows=9))
    assert few == [f"step time {TWO}, transformer", f"step time {TWO}, perceptron"]
    told = document(slower=None)
    assert len(unmet(told)) == 4 and "no choice was measured" in line(told)
    assert any("the plan chooses `dp_shard=2 of 0`, which was not measured" in one for one in section(told))
    assert "| choice on 4 processes, perceptron | 5% | - | not judged |" in section(told)


def test_a_later_prediction_says_of_when_it_is() -> None:
    told = document()
    assert "Predictions and choices" not in next(section(told))
    later = {**told, "predicted": {"date": "2026-12-01T08:00", "commit": "def"}}
    assert next(section(later)).endswith("7 turns. Predictions and choices are of 2026-12-01, commit `def`.")


def test_what_a_layout_string_does_not_hold_and_what_is_refused_is_said() -> None:
    told = document(rows=1)
    told["rows"][0] |= {"layout": "cp=2", "context": "ring"}
    told["refused"] = [{"processes": 4, "model": "transformer", "layout": "pp=2", "because": "two samples"}]
    assert any("| `cp=2`, `context=ring` | 0 |" in one for one in section(told))
    assert list(section(told))[-1] == "- refused on 4: transformer, `pp=2`: two samples"


def test_the_page_is_made_of_the_stored_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "plan_local.json"
    other.write_text(json.dumps(document(error=0.1234)))
    monkeypatch.setattr(local_plans, "RESULTS", other)
    found = render_local(MEASURED.read_text())
    assert found.count("12.3% on 2 and 12.3% on 4 processes") == 1 and "| 112.3 | 100.0 | +12.3% |" in found
    assert RESULTS.name in found
