"""`allranks bench scaling`: the real command on a real task, and what it refuses."""

import json
from pathlib import Path

import pytest

from allranks.cli.main import main
from tests.commands import POINTS, allranks

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "task.py")


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
        ([DIGITS, "--nproc", "64"], "train.global_batch(32) <"),
    ],
)
def test_what_the_task_does_not_allow_is_refused_too(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scaling", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("allranks: error: ") and told in err and len(err.splitlines()) == 1
