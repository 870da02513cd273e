"""From a PlanRequest to a question: numbers with suffixes, layouts, limits, exit codes."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.planned_model import find_subject
from allranks.cli.planning import ask, exit_code
from allranks.plan import Plan, Ranked
from allranks.plan_request import PlanRequest
from allranks.planning.hardware import find_cluster
from allranks.planning.question import Question
from allranks.planning.search import Search
from tests.planning.questions import ask as question_about


def question(**options: Any) -> Question:
    request = PlanRequest(("llama3-8b",), ("8:a100-80g",), **options)
    return ask(request, find_subject(request), find_cluster("8:a100-80g")).question


def test_numbers_with_suffixes() -> None:
    found = question(seq="32k", tokens="1.5T", deadline="2d", budget=5.0, price=2.0, watts=400.0)
    assert (found.seq, found.tokens, found.limit_seconds, found.limit_money) == (32768, 1.5e12, 172800.0, 5.0)
    assert (found.cluster.device_hour_price, found.cluster.device_watts) == (2.0, 400.0)
    assert found.global_batch == 2**22 // 32768
    assert any(note.startswith("global batch 128, because") for note in found.notes)


def test_a_written_layout_and_open_degrees() -> None:
    written = question(layout="tp=2,dp_shard=*").layout
    assert written is not None and (written.tp, written.dp_shard) == (2, "*")
    opened = question(layout="auto,recompute=full,schedule=gpipe")
    assert opened.layout is None and opened.modes == {"recompute": "full", "schedule": "gpipe"}


def test_a_question_mark_asks_for_the_least_or_the_most() -> None:
    request = PlanRequest(("llama3-8b",), ("8:a100-80g",), gpus="?")
    assert ask(request, find_subject(request), find_cluster("8:a100-80g")).gpus
    request = replace(request, gpus="2", seq="?")
    asked = ask(request, find_subject(request), find_cluster("8:a100-80g"))
    assert asked.seq and not asked.gpus and asked.question.cluster.num_devices == 2


def test_exit_codes() -> None:
    best = Search(question_about().space()).run().best
    assert best is not None
    fits = Plan("m", "c", 1, Ranked(best, "fits"), (), ())
    assert exit_code(fits) == 0
    assert exit_code(replace(fits, unmet=("late",))) == 1
    assert exit_code(Plan("m", "c", 1, None, (), (), Ranked(best, "near"))) == 1
    assert exit_code(Plan("m", "c", 0, None, (), ())) == 2


def test_the_run_saves_as_often_as_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from allranks.cli.main import main

    words = ["plan", "gpt2", "--cluster", "2:h100", "--global-batch", "8", "--save", str(tmp_path)]
    assert main([*words, "--checkpoint-every", "50"]) == 0
    assert tomllib.loads((tmp_path / "RUN.toml").read_text())["checkpoint"] == {"every": 50}
    assert main(words) == 0
    assert "checkpoint" not in tomllib.loads((tmp_path / "RUN.toml").read_text())


def test_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from allranks.cli.main import main

    page = tmp_path / "plan.html"
    assert main(["plan", "gpt2", "--cluster", "2:h100", "--global-batch", "8", "--html", str(page)]) == 0
    assert "gpt2" in page.read_text() and capsys.readouterr().out.startswith("gpt2 (")
