"""The table of what verify catches is that of the stored run, and the stored run is of this corpus."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.verifying.corpus import read_corpus
from tests.verifying.mistakes import START, UNSEEN, Mistake
from tools.law_mistakes import render_laws
from tools.measured_on import UNKNOWN
from tools.sentinel_scores import PAGE as SENTINELS
from tools.sentinel_scores import RESULTS as WATCHED
from tools.sentinel_scores import render_watched
from tools.verify_scores import BEGIN, PAGE, RESULTS, ROOT, missing_kinds, render_scores, render_verify

ROW: dict[str, Any] = {
    "name": "S08_means", "kind": "S8", "run": "--nproc 2", "what": "a | b.", "kinds": ["S9", "S8"],
    "outcome": "caught", "named_first": False,
}  # fmt: skip
COUNTS = ("caught", "wrong", "refused", "kinds_caught", "kinds", "named_first", "named", "false_alarms", "clean")
SCORE = dict.fromkeys((*COUNTS, "unverified", "unseen"), 3)


def test_the_page_is_what_the_run_says() -> None:
    assert PAGE.read_text() == render_verify()


def test_the_run_is_of_every_program_there_is() -> None:
    stored = json.loads(RESULTS.read_text())
    runs = {(result["name"], result["run"]) for result in stored["results"]}
    assert runs == {(entry.name, words) for entry in read_corpus(ROOT / "corpus") for words in entry.runs or ("",)}
    assert missing_kinds(stored) == []


def test_the_page_says_what_it_was_found_on() -> None:
    machine = {"date": "2030-01-02T03:04+00:00", "commit": "abc", "allranks": "9", "cores": 3, "torch": "9.9",
               "python": "4.0", "load": 1.5, "load_after": 2.5}  # fmt: skip
    document = {"machine": machine, "known": 4, "score": SCORE, "results": [ROW]}
    first = render_scores(document).splitlines()[0]
    assert first == (
        "On 2030-01-02, commit `abc`: 3 CPU cores, torch 9.9, Python 4.0, under a load of 1.5 at the start, 2.5 at the "
        "end. 4 of the results are an earlier run's of this very source."
    )
    assert "allranks 9:" in render_scores(document | {"machine": machine | {"commit": None}})
    shown = render_watched({"machine": machine, "score": {"caught": 0}, "results": []})
    assert shown.startswith("On 2030-01-02, commit `abc`: 3 CPU cores")


@pytest.mark.parametrize(("results", "page"), [(RESULTS, PAGE), (WATCHED, SENTINELS)])
def test_a_stored_run_says_when_and_where_it_was_made_or_its_page_that_nobody_knows(results: Path, page: Path) -> None:
    machine, told = json.loads(results.read_text()).get("machine"), page.read_text().split(BEGIN)[1]
    if machine is None:
        assert told.startswith(f"{UNKNOWN}\n")
        return
    assert {"date", "commit", "load", "load_after"} <= machine.keys()
    assert UNKNOWN not in told and told.startswith(f"On {machine['date'][:10]}, ")


def test_of_a_run_without_a_record_the_page_says_so() -> None:
    assert UNKNOWN == "No date or commit is on record for this run."
    assert render_scores({"score": SCORE, "results": [ROW]}).startswith(f"{UNKNOWN}\n\n- caught")
    assert render_watched({"score": {"caught": 0}, "results": []}).startswith(f"{UNKNOWN}\n\nOn the CPU")


def test_a_row_says_what_was_found() -> None:
    clean = ROW | {"name": "right", "kind": "clean", "what": "Right.", "kinds": ["S8"], "outcome": "false alarm"}
    text = render_scores({"score": SCORE, "results": [ROW, ROW | {"outcome": "missed"}, clean]})
    assert "| S8 | `S08_means` | a \\| b | S9 S8 (another name) |" in text
    assert "| S8 | `S08_means` | a \\| b | **missed** |" in text
    assert "| `right` | Right | `--nproc 2` | **false alarm** S8 |" in text
    assert missing_kinds({"results": [ROW]})[:2] == ["S1", "S2"]


def test_mistakes_of_our_own_are_told_by_law() -> None:
    mistake = Mistake(7, "low", "sums in bfloat16", "S37", "fsdp", ("task.blocks=deep",))
    text = render_laws([mistake, replace(mistake, kind=START), replace(mistake, kind="other")])
    assert "| 7: one precision everywhere | sums in bfloat16 | `--layout fsdp task.blocks=deep` | S37: grad" in text
    assert "| refused: the run's own comparison with one process" in text and "| other: something else is" in text
    assert text.count("\n- Law ") == len(UNSEEN)
