"""`allranks bench strategies`: the real command on one small layout, its table, and what it refuses."""

import json
from pathlib import Path

import pytest

from allranks.benchmarking.strategies import Row
from allranks.cli.bench import print_rows
from allranks.cli.main import main
from tests.commands import allranks


@pytest.mark.full
def test_the_real_command_says_one_document(tmp_path: Path) -> None:
    ran = allranks("bench", "strategies", "--layouts", "single", "--quick", "--turns", "2", "--json", folder=tmp_path)
    document = json.loads(ran.stdout)
    (row,) = document["rows"]
    assert (row["strategy"], row["layout"], row["processes"], row["turns"]) == ("single", "single", 1, 2)
    assert row["loss_difference"] <= 1e-4 and row["ratio"] > 0
    assert row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
    assert 0.8 < row["memory_ratio"] < 1.2  # a model of 10M parameters under AdamW is far above what else is allocated
    assert row["raw_bytes"] > 10_000_000 * 4 * 4
    assert document["command"] == 'allranks bench strategies --layouts "single" --turns 2 --quick'
    assert {"date", "torch", "cores", "load", "load_after"} <= document["machine"].keys()
    assert document["targets"] == {"time": 1.03, "memory": 1.02, "of_ddp": 1.25}
    assert "single on 1: measured" in ran.stderr


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--layouts", "ddpp"], "ddpp"),
        (["--layouts", "tp=2,dp_shard=2", "--nproc", "2"], "but the world has 2 processes"),
        (["--layouts", "ddp,recompute=budget,compile=block"], "no twin in raw torch"),
        (["--layouts", "cp=2,tp=2"], "cp has a twin here alone, or beside dp_replicate or dp_shard"),
        (["--layouts", " ; "], "--layouts"),
        (["--nproc", "two"], "--nproc two"),
        (["--nproc", "0"], "--nproc 0"),
        (["--turns", "1"], "--turns"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "strategies", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("allranks: error: ") and told in err and len(err.splitlines()) == 1


def test_the_table_marks_what_misses_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Row(
        strategy="fsdp",
        layout="dp_shard=2",
        processes=2,
        raw_ms=100.0,
        ours_ms=110.0,
        ratio=1.1,
        ratio_q1=1.05,
        ratio_q3=1.2,
        raw_bytes=100_000_000,
        ours_bytes=101_000_000,
        memory_ratio=1.01,
        of_ddp=None,
        loss_difference=0.0,
        turns=3,
        misses=("time",),
    )
    print_rows([slow])
    heading, line, *_ = capsys.readouterr().out.splitlines()
    assert "ratio (<= 1.03)" in heading and "of ddp (<= 1.25)" in heading
    assert " ".join(line.split()) == "fsdp 2 100.0 ms 110.0 ms 1.100 ! 1.050-1.200 100.0 MB 101.0 MB 1.010 -"
