"""Where two runs part: at which step, in what, and which keys of their configs differ."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from math import inf
from pathlib import Path
from typing import Any

from allranks.config import resolve_config
from allranks.reporting.compared import compare_runs
from allranks.run import Run


def make(
    root: Path,
    losses: Sequence[float | str],
    *overrides: str,
    ledgers: str = "abcdefgh",
    task: str = "digits.py:Digits",
) -> Run:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.steps=4", *overrides])
    run = Run.create(root, "Digits", config, {"task": task})
    lines: list[dict[str, Any]] = [{"event": "start", "attempt": 1}]
    for at, loss in enumerate(losses):
        told = {"loss": loss} if isinstance(loss, float) else {"loss_text": loss}
        lines.append(
            {"event": "step", "step": at + 1, "samples": 8 * at + 8, "lr": 0.1, "ledger": ledgers[at] * 16, **told}
        )
    run.journal().write_text("".join(json.dumps({"t": 1.0, **line}) + "\n" for line in lines))
    return run


def test_equal_runs_have_no_parting(tmp_path: Path) -> None:
    found = compare_runs(make(tmp_path, [4.0, 3.0, 2.0]), make(tmp_path, [4.0, 3.0]))
    assert (found.num_steps, found.last_step, found.partings, dict(found.config)) == (2, 2, (), {})
    assert "The 2 steps that both have made are the same" in found.render()


def test_a_loss_parts_by_rounding_first_and_visibly_later(tmp_path: Path) -> None:
    second = [4.0, 3.0 * (1 + 1e-8), 2.0 * (1 + 1e-5), 1.5]
    found = compare_runs(make(tmp_path, [4.0, 3.0, 2.0, 1.0]), make(tmp_path, second))
    assert [(one.what, one.limit, one.step) for one in found.partings] == [
        ("loss", 0.0, 2),
        ("loss", 1e-6, 3),
        ("loss", 1e-2, 4),
    ]
    assert "loss parts by more than 0.01 of it at step 4: 1 in the first, 1.5 in the second" in found.render()


def test_other_samples_and_another_config(tmp_path: Path) -> None:
    first = make(tmp_path, [4.0, 3.0, 2.0])
    second = make(tmp_path, [4.0, 3.0, 2.0], "train.seed=1", ledgers="abX")
    found = compare_runs(first, second)
    assert [(one.what, one.step, one.second) for one in found.partings] == [("ledger", 3, "X" * 16)]
    assert dict(found.config) == {"train.seed": (0, 1)}
    assert found.to_json()["config"] == {"train.seed": [0, 1]}


def test_runs_of_two_tasks_are_told(tmp_path: Path) -> None:
    first = make(tmp_path, [4.0])
    found = compare_runs(first, make(tmp_path, [4.0], task="words.py:Words"))
    assert "They are runs of two Tasks: digits.py:Digits and words.py:Words." in found.render()
    assert found.to_json()["tasks"] == ["digits.py:Digits", "words.py:Words"]
    same = compare_runs(first, make(tmp_path, [4.0]))
    assert same.to_json()["tasks"] == [] and "Tasks" not in same.render()


def test_settings_that_json_has_no_word_for_are_told_as_text(tmp_path: Path) -> None:
    found = replace(
        compare_runs(make(tmp_path, [1.0]), make(tmp_path, [1.0])), config={"task.x": (inf, date(2024, 1, 2))}
    )
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["config"] == {"task.x": ["inf", "2024-01-02"]}


def test_a_loss_that_is_no_number_parts_from_one_that_is(tmp_path: Path) -> None:
    found = compare_runs(make(tmp_path, [4.0, "nan"]), make(tmp_path, [4.0, 3.0]))
    assert {(one.what, one.step) for one in found.partings} == {("loss", 2)}
    json.dumps(found.to_json(), allow_nan=False)
    both = compare_runs(make(tmp_path, [4.0, "nan"]), make(tmp_path, [4.0, "nan"]))
    assert both.partings == ()


def test_runs_without_a_common_step(tmp_path: Path) -> None:
    assert "no step that both have made" in compare_runs(make(tmp_path, []), make(tmp_path, [4.0])).render()
