"""The banner says what stays and what changes when a run is spread."""

from dataclasses import replace

from allranks.reporting.banner import StepShape, render_banner
from allranks.verdict import Decision

ONE = StepShape(
    num_processes=1,
    global_batch=32,
    steps_per_epoch=120,
    total_steps=1200,
    schedule="cosine from 0.001 over 1200 steps",
    device_batch=(32, 32),
    micro_steps=2,
)
THREE = replace(ONE, num_processes=3, device_batch=(10, 11))


def test_three_processes() -> None:
    assert render_banner([Decision("backend gloo", "there is no CUDA device")], ONE, THREE) == [
        "Decided:",
        "  - backend gloo, because there is no CUDA device",
        "What 3 processes change, and what not:",
        "                                   1 process                          3 processes",
        "  global batch (samples per step)  32                                 the same",
        "  steps per epoch                  120                                the same",
        "  steps in all                     1200                               the same",
        "  learning rate                    cosine from 0.001 over 1200 steps  the same",
        "  samples per device and step      32                                 10 to 11",
        "  micro-steps (forwards per step)  2                                  the same",
    ]


def test_what_really_changes_is_never_called_the_same() -> None:
    wrong = replace(THREE, global_batch=96, steps_per_epoch=None, micro_steps=1)
    lines = render_banner([], ONE, wrong)
    assert [line.split()[-1] for line in lines[2:4]] == ["96", "known"]
    assert lines[-1].split()[-2:] == ["2", "1"]


def test_one_process_has_one_column() -> None:
    lines = render_banner([], ONE, ONE)
    assert lines[0] == "On one process:"
    assert lines[1] == "  global batch (samples per step)  32"
    assert not any("the same" in line for line in lines)
