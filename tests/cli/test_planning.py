"""From a PlanRequest to a question: numbers with suffixes, layouts, limits, exit codes."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli import planning
from allranks.cli.planned_model import find_subject
from allranks.cli.planning import ask, exit_code
from allranks.config_sections import LayoutConfig
from allranks.errors import ConfigError
from allranks.plan import Plan, Ranked
from allranks.plan_request import PlanRequest
from allranks.planning.hardware import find_cluster
from allranks.planning.question import Question, usual_batch
from allranks.planning.search import Search
from tests.commands import POINTS
from tests.planning.questions import ask as question_about


def question(**options: Any) -> Question:
    request = PlanRequest(("llama3-8b",), ("8:a100-80g",), **options)
    return ask(request, find_subject(request), find_cluster("8:a100-80g")).question


def question_of(request: PlanRequest) -> Question:
    return ask(request, find_subject(request), find_cluster(*request.cluster)).question


def test_numbers_with_suffixes() -> None:
    found = question(seq="32k", tokens="1.5T", deadline="2d", budget=5.0, price=2.0, watts=400.0)
    assert (found.seq, found.tokens, found.limit_seconds, found.limit_money) == (32768, 1.5e12, 172800.0, 5.0)
    assert (found.cluster.device_hour_price, found.cluster.device_watts) == (2.0, 400.0)
    assert found.global_batch == 2**22 // 32768
    assert any(note.startswith("global batch 128, because") for note in found.notes)


def test_prices_and_watts_of_something_else_are_noted() -> None:
    found = question(tokens="1T", price=100000.0, watts=0.7)
    assert any(note.startswith("--price = 100000 is more than any device costs for an hour") for note in found.notes)
    assert any(note.startswith("--watts = 0.7 is less than a100-80g takes under load") for note in found.notes)
    usual = question(tokens="1T", price=2.0, watts=400.0)
    assert not any(note.startswith("--") for note in usual.notes)


def test_the_batch_of_the_longest_samples_is_that_of_their_length() -> None:
    """The plan of the answered length says the same, and one that the user gave stays."""
    request = PlanRequest(("gpt2",), ("1:a100",), seq="?")
    found = ask(request, find_subject(request), find_cluster("1:a100")).plan()
    assert found.seq > 2**15 and found.best is not None
    again = question_of(replace(request, seq=str(found.seq)))
    assert found.best.estimate.choice.global_batch == again.global_batch == usual_batch(found.seq)[0] < 128
    batches = [note for note in found.notes if note.startswith("global batch ")]
    assert batches == [note for note in again.notes if note.startswith("global batch ")]
    assert batches[0].endswith(f"M tokens a step of {found.seq} each")
    given = question_of(replace(request, global_batch=64))
    assert given.global_batch == given.of_length(4096).global_batch == 64
    assert not any(note.startswith("global batch ") for note in given.of_length(4096).notes)


@pytest.mark.parametrize("given", [{"seq": "0.5"}, {"seq": "1.5"}, {"gpus": "8.9"}])
def test_parts_of_positions_and_devices_are_refused(given: dict[str, Any]) -> None:
    ((option, text),) = given.items()
    with pytest.raises(ConfigError, match=f"--{option} {text}: a whole number of at least 1"):
        question(**given)


@pytest.mark.parametrize("gpus", ["0", "-1", "-8", "0.0"])
def test_zero_devices_are_named_with_the_next_move(gpus: str) -> None:
    with pytest.raises(ConfigError, match=f"^--gpus {gpus}: no devices; give at least 1, or '\\?' to ask how many"):
        question(gpus=gpus)


def test_a_written_layout_and_open_degrees() -> None:
    written = question(layout="tp=2,dp_shard=*").layout
    assert written is not None and (written.tp, written.dp_shard) == (2, "*")
    opened = question(layout="auto,recompute=full,schedule=gpipe")
    assert opened.layout is None and opened.modes == {"recompute": "full", "schedule": "gpipe"}


def test_modes_beside_open_degrees_stand_in_every_layout() -> None:
    opened = question(layout="auto,compile=block,batchnorm=local,recompute=none")
    assert opened.modes == {"compile": "block", "batchnorm": "local", "recompute": "none"}
    assert any(note.startswith("layout.batchnorm=local is kept, and no plan weighs it") for note in opened.notes)
    found = Search(opened.space()).run()
    assert {(one.layout.compile, one.layout.batchnorm, one.layout.recompute) for one in found.estimates} == {
        ("block", "local", "none")
    }


def of_task(*words: str, layout: str | None = None) -> Question:
    request = PlanRequest((POINTS, *words), ("1x2:cpu",), layout=layout)
    return ask(request, find_subject(request), find_cluster("1x2:cpu")).question


def test_modes_of_a_tasks_config_are_kept_where_the_degrees_are_open() -> None:
    opened = of_task("layout.gather=float32", "layout.static_graph=true")
    assert opened.layout is None and opened.modes == {"gather": "float32", "static_graph": True}
    assert [note for note in opened.notes if "no plan weighs" in note] == [
        "layout.static_graph=true is kept, and no plan weighs it: the figures are those of a run without it"
    ]
    assert of_task("layout.recompute=full", layout="auto").modes == {"recompute": "full"}
    assert of_task("layout.dp_shard=2", layout="auto").layout is None


def test_modes_of_a_tasks_config_are_kept_beside_a_written_layout() -> None:
    written = of_task("layout.ddp_hook=powersgd", "layout.powersgd_rank=2", layout="ddp")
    assert written.layout == LayoutConfig(dp_replicate="*", ddp_hook="powersgd", powersgd_rank=2)
    assert [note.partition(" is kept")[0] for note in written.notes if "no plan weighs" in note] == [
        "layout.powersgd_rank=2",
        "layout.ddp_hook=powersgd",
    ]
    assert of_task("layout.recompute=full", layout="ddp,recompute=none").layout == LayoutConfig(dp_replicate="*")


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler, which tracing imports, sets it where nobody did."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.mark.usefixtures("traces")
def test_a_mode_that_the_engine_refuses_beside_the_layout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from allranks.cli.main import main

    words = ["plan", POINTS, "layout.ddp_hook=powersgd", "--cluster", "1x2:cpu", "--layout", "fsdp"]
    assert main(words) == 2
    assert "changes what DDP sends" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("traces")
def test_the_saved_run_has_the_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from allranks.cli.main import main

    words = ["plan", POINTS, "layout.static_graph=true", "layout.batchnorm=local", "--cluster", "1x2:cpu"]
    assert main([*words, "--save", str(tmp_path)]) == 0
    saved = tomllib.loads((tmp_path / "RUN.toml").read_text())["layout"]
    assert saved["static_graph"] is True and saved["batchnorm"] == "local"


def test_a_question_mark_asks_for_the_least_or_the_most() -> None:
    request = PlanRequest(("llama3-8b",), ("8:a100-80g",), gpus="?")
    assert ask(request, find_subject(request), find_cluster("8:a100-80g")).gpus
    request = replace(request, gpus="2", seq="?")
    asked = ask(request, find_subject(request), find_cluster("8:a100-80g"))
    assert asked.seq and not asked.gpus and asked.question.cluster.num_devices == 2


@pytest.mark.parametrize(("layout", "devices"), [("single", "1 device"), ("dp_shard=4,tp=2", "8 devices")])
def test_a_layout_of_numbers_leaves_no_number_of_devices_to_look_for(layout: str, devices: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"the layout {layout} is of {devices}, so that .*; give --gpus {devices[0]},"
    ):
        question(layout=layout, gpus="?")


def test_an_open_degree_does_and_sizes_that_it_does_not_divide_are_passed_over() -> None:
    request = PlanRequest(("llama3-8b",), ("8:a100-80g",), gpus="?", layout="tp=4,dp_shard=*", global_batch=8, seq="4k")
    plan = ask(request, find_subject(request), find_cluster("8:a100-80g")).plan()
    assert plan.best is not None and plan.num_devices in (4, 8)
    told = f"{plan.num_devices} devices are the fewest of the numbers tried, because"
    assert any(note.startswith(told) for note in plan.notes)


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


def test_a_plan_that_does_not_fit_is_saved_without_a_way_to_train_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from allranks.cli.main import main

    words = ["plan", "llama3-70b", "--cluster", "4:a100-40g", "--layout", "auto,offload=none", "--save", str(tmp_path)]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "allranks train" not in told
    assert told.endswith(
        f"{tmp_path / 'RUN.toml'} holds the closest, which does not fit: it is there to be changed, not to be trained\n"
    )
    first, *others = (tmp_path / "RUN.toml").read_text().splitlines()
    assert first.startswith("# The closest on 4:a100-40g: does not fit: ")
    assert tomllib.loads("\n".join(others))["layout"]
    assert main(["plan", "gpt2", "--cluster", "2:h100", "--global-batch", "8", "--save", str(tmp_path)]) == 0
    assert f"  allranks train TASK {tmp_path / 'RUN.toml'}" in capsys.readouterr().out
    assert not (tmp_path / "RUN.toml").read_text().startswith("#")


def test_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from allranks.cli.main import main

    page = tmp_path / "plan.html"
    assert main(["plan", "gpt2", "--cluster", "2:h100", "--global-batch", "8", "--html", str(page)]) == 0
    assert "gpt2" in page.read_text() and capsys.readouterr().out.startswith("gpt2 (")


GPT2 = ("plan", "gpt2", "--cluster", "2:h100", "--global-batch", "8")


@pytest.mark.parametrize("option", ["--html", "--save"])
def test_where_the_files_go_is_checked_before_the_plan(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from allranks.cli.main import main

    monkeypatch.setattr(planning, "find_subject", lambda *_: pytest.fail("it was planned"))
    (tmp_path / "RUN.toml").mkdir()
    place = tmp_path if option == "--save" else tmp_path / "RUN.toml"
    assert main([*GPT2, option, str(place)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and f"{tmp_path / 'RUN.toml'} is a directory; name a file" in told.err
    assert main([*GPT2, "--html", ""]) == 2
    assert "names no file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_plan_is_told_also_where_its_page_cannot_be_written(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from allranks.cli.main import main

    monkeypatch.setattr("allranks.durable.sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert main([*GPT2, "--html", str(tmp_path / "plan.html"), *words]) == 2
    told = capsys.readouterr()
    assert (json.loads(told.out)["model"] if words else told.out[:4]) == "gpt2"
    assert told.err.endswith("plan.html cannot be written: No space left; name another place\n")


def test_a_tasks_file_is_seen_from_the_saved_plan_and_a_module_stays_as_it_is(tmp_path: Path) -> None:
    beside = planning._beside
    assert beside("/a/task.py", Path("/a/out")) == "../task.py"
    assert beside("/a/.pyenv/x:y/task.py", Path("/a/out")) == "../.pyenv/x:y/task.py"
    assert beside("/a/task.py:Mine", Path("/a")) == "task.py:Mine"
    for module in ("research.pytorch.tasks:GPT", "research.pytorch.tasks", "tasks:pyramid"):
        assert beside(module, tmp_path) == module
    assert beside(None, tmp_path) is None
