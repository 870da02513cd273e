"""The table, its words and its picture."""

import json
from dataclasses import replace

import pytest

from allranks.benchmarking.scaling import Row
from allranks.cli.scaling_rows import explain, print_rows, render_plot

ONE = Row(
    mode="strong",
    strategy="ddp",
    layout="single",
    processes=1,
    global_batch=32,
    step_ms=200.0,
    samples_per_second=160.0,
    speedup=1.0,
    speedup_q1=1.0,
    speedup_q3=1.0,
    efficiency=1.0,
    time_saved=0.0,
    memory_bytes=343_000_000,
    loss=1.25,
    loss_difference=0.0,
    validation={"loss": 1.5},
    same_samples=True,
    repeats=3,
)
TWO = replace(
    ONE,
    layout="dp_replicate=2",
    processes=2,
    step_ms=125.0,
    speedup=1.6,
    speedup_q1=1.5,
    speedup_q3=1.7,
    efficiency=0.8,
    time_saved=0.375,
    loss_difference=2e-7,
)


def test_the_table_says_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([ONE, TWO, replace(ONE, mode="weak"), replace(TWO, mode="weak", validation={}, repeats=1)])
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "dp_replicate=2 2 32 125.0 ms 160 1.60 1.50-1.70 80% 38% 343.0 MB 1.2500 2.0e-07 1.5000" in lines
    assert "dp_replicate=2 2 32 125.0 ms 160 1.60 - 80% 38% 343.0 MB 1.2500 2.0e-07 -" in lines
    assert [line.split()[0] for line in lines if "efficiency" in line] == ["strong", "weak"]


def test_words_for_what_was_compared() -> None:
    said = explain([ONE, TWO])
    assert "Beside single on 1 process, 200.0 ms a step." in said
    assert "Fastest: dp_replicate=2 on 2 processes, 38% less time for as many samples." in said
    assert "Every step saw the same samples; the losses reached differ by 2.0e-07" in said
    assert "Nothing was faster" in explain([ONE, replace(TWO, speedup=0.5)])
    assert "saw other samples under dp_replicate=2" in explain([ONE, replace(TWO, same_samples=False)])
    weak = explain([replace(ONE, mode="weak"), replace(TWO, mode="weak", same_samples=False)])
    assert "another training" in weak and "saw" not in weak


def test_the_picture_has_a_line_for_each_strategy() -> None:
    rows = [
        ONE,
        TWO,
        replace(TWO, strategy="fsdp", layout="dp_shard=2"),
        replace(TWO, layout="dp_replicate=4", processes=4),
    ]
    drawn = lines_of(render_plot(rows))
    assert drawn == 3 * [("ddp", [1, 2, 4]), ("fsdp", [1, 2])]
    both = render_plot([*rows, replace(ONE, mode="weak"), replace(TWO, mode="weak")])
    assert {"ddp, strong", "ddp, weak"} <= {name for name, _ in lines_of(both)}


def lines_of(page: str) -> list[tuple[str, list[float]]]:
    """Of each line with a name on the page its x values."""
    traces = json.JSONDecoder().raw_decode(page, page.index("[", page.rindex("Plotly.newPlot(")))[0]
    return [(trace["name"], trace["x"]) for trace in traces if "name" in trace]
