"""`allranks bench scaling`: the real command on a real task, and what it refuses."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from allranks.benchmarking import machine, scaling, training_runs
from allranks.cli import bench_scaling
from allranks.cli.main import main
from tests.commands import POINTS, allranks

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS, TEXT = str(EXAMPLES / "digits" / "task.py"), str(EXAMPLES / "text" / "task.py")


@pytest.mark.distributed
@pytest.mark.full
def test_digits_on_one_process_and_on_two(tmp_path: Path) -> None:
    ran = allranks("bench", "scaling", DIGITS, "--quick", "--json", "--plot", "plot.html", folder=tmp_path)
    document = json.loads(ran.stdout)
    one, two = document["rows"]
    assert (one["layout"], two["layout"], two["processes"], two["mode"]) == ("single", "dp_replicate=2", 2, "strong")
    assert one["global_batch"] == two["global_batch"] == 32
    assert one["speedup"] == one["efficiency"] == 1.0
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2, abs=1e-4)
    assert two["samples_per_second"] / one["samples_per_second"] == pytest.approx(two["speedup"], rel=1e-3)
    assert two["same_samples"] and two["loss_difference"] < 1e-5  # law 1
    assert 0.5 < one["loss"] < 2.4
    assert two["memory_bytes"] > 50_000_000
    assert (document["steps"], document["arguments"]) == (20, [DIGITS, "evaluate.every=0"])
    assert document["machine"]["cores"] >= 1
    assert document["decisions"][0]["what"].endswith("in each process")
    assert "2/2  dp_replicate=2 on 2 processes, 32 samples a step: " in ran.stderr
    assert (tmp_path / "plot.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.html"]


@pytest.mark.full
@pytest.mark.distributed
def test_real_text_in_both_modes_over_strategies(tmp_path: Path) -> None:
    """Strong: the same training whatever the strategy, cut in its layers too. Weak: as much for each that sees data."""
    text = f"data.text={EXAMPLES.parent / 'docs'}/**/*.md"
    layouts = ("--nproc", "1,2", "--layouts", "ddp;fsdp;tp=2", "--mode", "both")
    quick = ("--quick", "--json", "--plot", "plot.html")
    ran = allranks("bench", "scaling", TEXT, text, "task.seq=32", *layouts, *quick, folder=tmp_path)
    rows = {(row["mode"], row["layout"]): row for row in json.loads(ran.stdout)["rows"]}
    spread = ("dp_replicate=2", "dp_shard=2", "tp=2")
    assert sorted(rows) == sorted((mode, layout) for mode in ("strong", "weak") for layout in ("single", *spread))
    assert [rows["strong", layout]["global_batch"] for layout in ("single", *spread)] == [16] * 4
    assert [rows["weak", layout]["global_batch"] for layout in ("single", *spread)] == [16, 32, 32, 32]
    for layout in spread:
        strong, weak = rows["strong", layout], rows["weak", layout]
        assert strong["same_samples"] and strong["loss_difference"] < 1e-4  # laws 1 and 4, in float32
        assert not weak["same_samples"]
        for row in (strong, weak):
            assert row["time_saved"] == pytest.approx(1 - 1 / row["speedup"], abs=1e-3)
            assert row["memory_bytes"] > 50_000_000 and 1.0 < row["loss"] < 5.6
    # One process of both modes is one run.
    assert ran.stderr.count("single on 1 process") == 1 and "7/7" in ran.stderr
    drawn = (tmp_path / "plot.html").read_text()
    names = [f"{strategy}, {mode}" for strategy in ("ddp", "fsdp", "tp=2") for mode in ("strong", "weak")]
    assert all(f'"name":"{name}"' in drawn for name in names)


@pytest.mark.full
@pytest.mark.distributed
def test_a_task_that_fails_is_undetermined(tmp_path: Path) -> None:
    arguments = ("bench", "scaling", POINTS, "task.boom_rank=1", "--nproc", "1,2", "--layouts", "ddp", "--mode", "weak")
    ran = allranks(*arguments, "--steps", "30", "--json", folder=tmp_path, check=3)
    error = json.loads(ran.stdout)
    assert error["exit_code"] == 3 and error["kind"] == "ProcessError"
    assert error["error"].startswith("dp_replicate=2 on 2 processes, 64 samples a step: exit code 1: ")
    assert error["error"].endswith("ValueError: the user's own mistake")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--layouts", "ddpp"], "ddpp"),
        (["--layouts", ";"], "--layouts"),
        (["--nproc", "0"], "--nproc 0"),
        (["--nproc", "1,x"], "--nproc 1,x"),
        (["--steps", "5"], "--steps"),
        (["--repeats", "0"], "--repeats"),
        (["--mode", "week"], "week"),
        (["--plot", "plot.png"], "ends in .html"),
        (["--plot", "no/such/plot.html"], "no/such is no directory"),
        (["train.steps=5"], "--steps"),
        (["train.epochs=5"], "--steps"),
        (["two words"], "two words"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", DIGITS, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("allranks: error: ") and told in err and len(err.splitlines()) == 1


@pytest.mark.distributed
@pytest.mark.parametrize(
    "arguments, told",
    [
        (["no_such_task.py"], "no_such_task.py"),
        pytest.param([DIGITS, "--nproc", "64"], "train.global_batch(32) <", marks=pytest.mark.full),
    ],
)
def test_what_the_task_does_not_allow_is_refused_too(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scaling", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("allranks: error: ") and told in err and len(err.splitlines()) == 1


def test_where_the_page_goes_is_checked_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_runs, "ask_config", lambda *_: pytest.fail("a process was started"))
    (tmp_path / "out.html").mkdir()
    assert main(["bench", "scaling", DIGITS, "--plot", str(tmp_path / "out.html")]) == 2
    assert capsys.readouterr().err.startswith(f"allranks: error: {tmp_path / 'out.html'} is a directory")


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_rows_are_told_also_where_the_page_cannot_be_written(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_runs, "ask_config", lambda *_: None)
    monkeypatch.setattr(training_runs, "measure_all", lambda *_, **__: {})
    point = SimpleNamespace(layout=SimpleNamespace(world_size=1), run=0)
    monkeypatch.setattr(scaling, "plan_points", lambda *_: [point])
    monkeypatch.setattr(scaling, "summarise", lambda *_: [])
    monkeypatch.setattr(machine, "describe_machine", lambda *_: {})
    monkeypatch.setattr(bench_scaling, "print_rows", lambda rows: print("the rows"))
    monkeypatch.setattr(bench_scaling, "render_plot", lambda rows: "a new page")
    page = tmp_path / "out.html"
    page.write_text("the old page")
    with monkeypatch.context() as full:
        full.setattr("allranks.durable.sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert main(["bench", "scaling", DIGITS, "--nproc", "1", "--plot", str(page), *words]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["rows"] == [] if words else told.out == "the rows\n"
    assert told.err.endswith(f"{page} cannot be written: No space left; name another place\n")
    assert page.read_text() == "the old page"
    assert main(["bench", "scaling", DIGITS, "--nproc", "1", "--plot", str(page), *words]) == 0
    assert page.read_text() == "a new page"
