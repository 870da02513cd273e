"""The program that sets predicted steps beside measured ones: it runs, and what it says follows from its rows."""

import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from allranks.plan import StepTime
from allranks.planning.choices import Space, every_choice
from tests.planning.profiles import cluster, decoder

BENCH = Path(__file__).parents[2] / "bench"
PROGRAM = BENCH / "plan_local.py"
LIMIT_SECONDS = 300


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/local_cases.py."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("local_cases")


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/local_predictions.py."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("local_predictions")


def row(predictions: Any, layout: str, turns: tuple[float, ...], predicted: float = 0.1, **changes: Any) -> Any:
    """A row of a perceptron on two processes, whose turns are in seconds and whose processor worked half of them."""
    case = predictions.Case("perceptron", layout, 128, 64)
    made = predictions.measured_row(case, 2, [turns, [second / 2 for second in turns]], [[1e-3], [2e-3]])
    return predictions.replace(made.with_prediction(StepTime(compute=predicted)), **changes)


@pytest.mark.parametrize("model", ["transformer", "perceptron"])
def test_two_processes_have_ten_layouts_of_each_model(cases: Any, model: str) -> None:
    found, refused = cases.plan_cases(2, quick=False, only=model)
    assert len(found) >= 10 and {case.model for case in found} == {model} and refused == []


def test_four_processes_have_each_axis_alone_and_beside_both_kinds_of_copies(cases: Any) -> None:
    found, _ = cases.plan_cases(4, quick=False)
    for model in ("transformer", "perceptron"):
        layouts = {case.layout for case in found if case.model == model}
        assert {"dp_replicate=4", "dp_shard=4", "tp=4", "pp=4"} <= layouts
        assert {f"dp_{kind}=2,{axis}=2" for kind in ("replicate", "shard") for axis in ("tp", "pp")} <= layouts
    assert "cp=4" in {case.layout for case in found if case.model == "transformer"}


@pytest.mark.parametrize("processes", [2, 4])
def test_layouts_of_a_model_have_one_batch_and_none_is_listed_twice(cases: Any, processes: int) -> None:
    found, _ = cases.plan_cases(processes, quick=False)
    assert len(set(found)) == len(found)
    assert {(case.model, case.global_batch) for case in found} == set(cases.GLOBAL_BATCH.items())
    worlds = {case.resolve(processes).world_size for case in found}
    assert worlds == {processes}


def test_nothing_of_what_a_search_may_choose_is_lost_on_the_way_to_its_processes(cases: Any) -> None:
    profile = decoder()
    every = list(every_choice(Space({"float32": profile}, cluster(devices=4), 4)))
    assert {choice.layout.context for choice in every} == {"ulysses", "ring"}
    assert {choice.chunks for choice in every} == {1, 2}
    for choice in every:
        assert cases.choice_of(cases.case_of("transformer", choice), 4) == choice


def test_what_is_chosen_is_measured_once(cases: Any) -> None:
    listed, _ = cases.plan_cases(4, quick=True)
    known = next(case for case in listed if case.model == "perceptron")
    new = cases.Case("transformer", "cp=4", 4, 4, "ring")
    found = cases.with_chosen(listed, {"transformer": new, "perceptron": known})
    models = [case.model for case in found]
    assert sorted(found, key=str) == sorted([*listed, new], key=str)
    assert found.index(new) == models.index("perceptron") - 1


def test_a_model_that_does_not_fit_is_not_measured(cases: Any) -> None:
    with pytest.raises(cases.LayoutError, match="transformer: no layout fits on 1x2:toy"):
        cases.chosen_cases({"transformer": decoder()}, cluster(devices=2, memory_bytes=1e3))


def test_a_row_is_the_median_of_the_slowest_process(predictions: Any) -> None:
    seconds = [[0.1, 0.2, 0.4], [0.3, 0.1, 0.2]]
    case = predictions.Case("transformer", "cp=2", 4, 4, "ring")
    made = predictions.measured_row(case, 2, seconds, [[0.1, 0.1, 0.3], [0.2, 0.2, 0.1]])
    assert made.turns_ms == (300.0, 200.0, 400.0) and made.measured_ms == 300.0 and made.fastest_ms == 200.0
    assert made.busy_ms == pytest.approx(200.0) and made.case == ("cp=2", "ring", 4)
    told = made.with_prediction(StepTime(compute=0.2, optimizer=0.04))
    assert told.predicted_ms == pytest.approx(240.0) and told.error == pytest.approx(-0.2)
    assert told.parts_ms == pytest.approx({"compute": 200.0, "optimizer": 40.0})


def test_the_choice_is_the_searchs_and_not_the_best_of_the_rows(predictions: Any) -> None:
    rows = [row(predictions, "tp=2", (0.1, 0.1), predicted=0.05), row(predictions, "pp=2", (0.11, 0.13))]
    taken = predictions.Case("perceptron", "pp=2", 128, 64)
    (found,) = predictions.choices(rows, {(2, "perceptron"): taken})
    assert (found["chosen"]["layout"], found["best"]["layout"]) == ("pp=2", "tp=2")
    assert found["slower"] == pytest.approx(0.2) and found["slower_by_fastest"] == pytest.approx(0.1)


def test_a_choice_that_was_not_measured_is_no_choice_that_is_fast(predictions: Any) -> None:
    rows = [row(predictions, "tp=2", (0.1,))]
    other = predictions.Case("perceptron", "tp=2", 128, 32)
    (found,) = predictions.choices(rows, {(2, "perceptron"): other})
    assert found["slower"] is None and found["best"]["layout"] == "tp=2"


def test_means_are_of_each_number_of_processes(predictions: Any) -> None:
    rows = [row(predictions, "tp=2", (0.1,), predicted=0.11), row(predictions, "pp=2", (0.1,), predicted=0.07)]
    rows.append(row(predictions, "pp=4", (0.2,), predicted=0.1, processes=4))
    found = predictions.judged(rows, {})
    assert found["mean_error"] == pytest.approx({"2": 0.2, "4": 0.5})
    assert found["goals"] == {"error": 0.15, "slower": 0.05}, "the issue's"


def test_today_may_predict_anew_beside_what_was_measured(predictions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = cluster(devices=2)
    made = row(predictions, "dp_replicate=2", (0.1,), predicted=0.5)
    before = {"machine": {"commit": "old"}, "clusters": {"2": predictions.store_cluster(where)}, "turns": 1}
    before |= json.loads(json.dumps({"rows": [asdict(made)]}))
    profile = decoder()
    monkeypatch.setattr(predictions, "profiles_of", lambda models: dict.fromkeys(models, profile))
    found = predictions.repredict(before)
    (told,), (choice,) = found["rows"], found["choices"]
    case = predictions.Case("perceptron", "dp_replicate=2", 128, 64)
    now = predictions.predict(case, 2, profile, where).total
    assert told["predicted_ms"] == pytest.approx(now * 1e3) and told["error"] == pytest.approx(now / 0.1 - 1)
    assert told["measured_ms"] == 100.0 and found["machine"] == before["machine"]
    chosen = predictions.chosen_cases({"perceptron": profile}, where)["perceptron"]
    assert choice["chosen"]["layout"] == chosen.layout and choice["chosen"]["micro_batch"] == chosen.micro_batch


@pytest.mark.full
@pytest.mark.distributed
def test_a_quick_run_predicts_and_measures_every_layout() -> None:
    command = [sys.executable, str(PROGRAM), "--quick", "--turns", "1", "--model", "perceptron", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    rows = found["rows"]
    listed = [("dp_replicate=2", 64), ("dp_replicate=2", 32), ("dp_shard=2", 64), ("pp=2", 32)]
    (choice,) = found["choices"]
    chosen = (choice["chosen"]["layout"], choice["chosen"]["micro_batch"])
    assert [(row["layout"], row["micro_batch"]) for row in rows] == list(dict.fromkeys([*listed, chosen]))
    for row in rows:
        assert row["predicted_ms"] == pytest.approx(sum(row["parts_ms"].values()))
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
        assert 0 < min(row["turns_ms"]) <= row["measured_ms"]
    assert found["mean_error"] == {"2": pytest.approx(sum(abs(row["error"]) for row in rows) / len(rows))}
    best = min(rows, key=lambda row: row["measured_ms"])
    taken = next(row for row in rows if (row["layout"], row["micro_batch"]) == chosen)
    assert choice["best"]["layout"] == best["layout"] and choice["model"] == "perceptron"
    assert choice["slower"] == pytest.approx(taken["measured_ms"] / best["measured_ms"] - 1)
    assert taken["predicted_ms"] == pytest.approx(min(row["predicted_ms"] for row in rows))
    assert found["quick"] and "--quick" in found["clusters"]["2"] and found["refused"] == []
