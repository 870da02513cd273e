"""The table of what sentinels catch is that of the stored run, and the stored run is of these programs."""

import json
from typing import Any

from allranks.verifying.corpus import read_corpus
from allranks.verifying.watched import is_task
from tools.sentinel_scores import PAGE, RESULTS, ROOT, TASKS, render_sentinels, render_tasks, render_watched

ROW: dict[str, Any] = {
    "name": "S39_bit", "kind": "S39", "run": "--nproc 2", "what": "a | b.", "sentinels": ["replicas"], "step": 8,
    "outcome": "caught",
}  # fmt: skip


def test_the_page_is_what_the_run_says() -> None:
    assert PAGE.read_text() == render_sentinels()


def test_the_run_is_of_every_task_there_is() -> None:
    stored = json.loads(RESULTS.read_text())
    found = {(row["name"], row["run"]) for row in stored["results"]}
    entries = [entry for entry in read_corpus(ROOT / "corpus" / "watched") if is_task(entry.path)]
    assert found == {(entry.name, words) for entry in entries for words in entry.runs}
    assert sum(stored["score"][name] for name in ("missed", "false alarm", "failed")) == 0


def test_the_other_run_is_of_every_task_of_the_corpus() -> None:
    stored = json.loads(TASKS.read_text())
    found = {(row["name"], row["run"]) for row in stored["results"] if row["outcome"] != "not watched"}
    entries = [entry for entry in read_corpus(ROOT / "corpus") if is_task(entry.path)]
    assert found == {(entry.name, words) for entry in entries for words in entry.runs}
    assert {row["outcome"] for row in stored["results"] if row["kind"] == "clean"} == {"clean", "not watched"}


def test_a_wrong_task_has_what_both_say_of_it() -> None:
    missed = ROW | {"name": "S30_mean", "kind": "S30", "sentinels": [], "step": None, "outcome": "missed"}
    clean = missed | {"name": "right", "kind": "clean", "outcome": "clean"}
    accused = ROW | {"name": "left", "kind": "clean", "outcome": "false alarm"}
    loop = ROW | {"name": "S01_loop", "run": "", "outcome": "not watched", "said": "a loop of its own"}
    verified = [
        {"name": "S39_bit", "run": "--nproc 2", "kinds": ["S39", "S11"], "outcome": "caught"},
        {"name": "S30_mean", "run": "--nproc 2", "kinds": [], "outcome": "refused"},
    ]
    text = render_tasks({"results": [ROW, missed, clean, accused, loop]}, {"results": verified})
    assert "- wrong Tasks: 1 caught, 1 missed\n- no sentinel found anything in 1 of 2 runs of 2 clean Tasks" in text
    assert "| S39 | `S39_bit` | a \\| b | `--nproc 2` | S39 S11 | `replicas`, step 8 |" in text
    assert "| S30 | `S30_mean` | a \\| b | `--nproc 2` | refused | missed |" in text
    assert "| `right` | `--nproc 2` | clean |" in text and "S01_loop" not in text
    assert "| `left` | `--nproc 2` | **false alarm**: `replicas`, step 8 |" in text


def test_a_row_says_which_sentinel_and_when() -> None:
    rows = [ROW, ROW | {"sentinels": [], "step": None, "outcome": "missed"}]
    text = render_watched({"score": {"caught": 1, "missed": 1}, "results": rows})
    assert "On the CPU: caught: 1, missed: 1." in text
    # Of a run that is older than the columns behind it.
    assert "| `S39_bit` | a \\| b | `--nproc 2` | `replicas`, step 8 | - | - |" in text
    assert "| `S39_bit` | a \\| b | `--nproc 2` | missed | - | - |" in text


def test_a_row_says_which_kind_it_names_what_it_costs_and_why_it_was_not_watched() -> None:
    right = ROW | {"kinds": ["S39", "S11"], "named": True, "cost": 0.01234}
    loop = ROW | {"run": "", "outcome": "not watched", "said": "a loop of its own", "kinds": [], "cost": None}
    text = render_watched({"score": {}, "results": [right, right | {"kind": "S25", "named": False}, loop]})
    assert "| `replicas`, step 8 | S39 S11 | 1.23% |" in text
    assert "| `replicas`, step 8 | S39 S11 (not S25) | 1.23% |" in text
    assert "| `S39_bit` | a \\| b | - | not watched: a loop of its own | - | - |" in text
    lines = text.splitlines()[-5:]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
