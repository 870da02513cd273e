"""The figures hold the plan's values: every part, the interval, the capacity, every micro-step."""

import re
from dataclasses import fields, replace

import pytest

from allranks.layout import Layout
from allranks.plan import MemoryUse, Span, StepTime
from allranks.reporting.page import COLOURS
from allranks.reporting.plan_figures import (
    CAUSES,
    HOLDINGS,
    draw_memory,
    draw_timeline,
    draw_times,
    parts_of,
    spare_of,
)
from allranks.reporting.plan_text import SPARE
from allranks.reporting.plotly_bundle import read_asset
from allranks.reporting.timeline import make_timeline
from tests.reporting import plans

ESTIMATE = plans.make_estimate()


def test_parts_have_the_noun_s_values_and_a_colour_each() -> None:
    for whole, labels in ((plans.MEMORY, HOLDINGS), (plans.TIME, CAUSES)):
        parts = parts_of(whole)
        assert [part.name for part in parts] == [part.name for part in fields(whole)]
        assert [part.label for part in parts] == list(labels.values())
        assert sum(part.size for part in parts) == pytest.approx(whole.total)
        assert len({part.colour for part in parts}) == len(parts)


def test_colours_stand_out_from_both_papers() -> None:
    papers = re.findall(r"--paper: (#\w{6})", read_asset("page.css"))
    assert len(papers) == 2
    for colour in COLOURS:
        assert min(contrast(colour, paper) for paper in papers) >= 3


@pytest.mark.parametrize("name", ["ink", "soft", "accent"])
def test_text_stands_out_from_paper_and_boxes(name: str) -> None:
    style = read_asset("page.css")
    texts, papers, boxes = (re.findall(rf"--{each}: (#\w{{6}})", style) for each in (name, "paper", "box"))
    for text, paper, box in zip(texts, papers, boxes, strict=True):
        assert min(contrast(text, paper), contrast(text, box)) >= 4.5


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's ratio of relative luminances."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_memory_is_stacked_against_the_capacity() -> None:
    figure = draw_memory(ESTIMATE)
    bars = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data if trace.type == "bar"}
    assert set(bars) == {
        "weights",
        "gradients",
        "optimizer state",
        "activations",
        "logits",
        "gathered blocks",
        "framework",
    }
    assert set(bars["weights"]) == {"fullest", "stage 0", "stage 2"}
    assert sum(values["fullest"] for values in bars.values()) == pytest.approx(ESTIMATE.memory.total / 1e9)
    assert bars["activations"]["stage 2"] == pytest.approx(12.6)
    assert figure.layout.barmode == "stack"
    (line,), (note,) = figure.layout.shapes, figure.layout.annotations
    assert line.x0 == line.x1 == pytest.approx(79.0) and note.text == "capacity 79.0 GB"
    (peak,) = (trace for trace in figure.data if trace.type == "scatter")
    assert peak.x[0] + peak.error_x.array[0] == pytest.approx(ESTIMATE.peak_bytes.high / 1e9)
    assert peak.x[0] - peak.error_x.arrayminus[0] == pytest.approx(ESTIMATE.peak_bytes.low / 1e9)


def test_the_allocators_spare_is_in_the_stack_of_the_fullest_which_ends_at_the_peak() -> None:
    spare = 5e9
    peak = ESTIMATE.peak_bytes
    found = replace(ESTIMATE, peak_bytes=Span(peak.low, ESTIMATE.memory.total + spare, peak.high + spare))
    bars = [trace for trace in draw_memory(found).data if trace.type == "bar"]
    stacked = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in bars}
    assert stacked[SPARE] == {"fullest": pytest.approx(5.0), "stage 0": 0.0, "stage 2": 0.0}
    assert sum(values["fullest"] for values in stacked.values()) == pytest.approx(found.peak_bytes.expected / 1e9)
    assert len({trace.marker.color for trace in bars}) == len(bars)
    assert spare_of(found).size == pytest.approx(spare) and spare_of(ESTIMATE).size == 0.0


@pytest.mark.parametrize("capacity", [1e9, 79e9, 900e9])
def test_peak_and_capacity_are_on_the_chart(capacity: float) -> None:
    figure = draw_memory(plans.make_estimate(capacity=capacity))
    assert figure.layout.xaxis.range[1] > max(capacity, ESTIMATE.peak_bytes.high) / 1e9


def test_times_have_a_row_for_each_configuration() -> None:
    other = plans.make_estimate(time=StepTime(compute=40.0))
    figure = draw_times({"best": ESTIMATE, "no. 2": other})
    bars = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data if trace.type == "bar"}
    assert bars["computation"] == {"best": 19.5, "no. 2": 40.0}
    assert sum(values["best"] for values in bars.values()) == pytest.approx(ESTIMATE.time.total)
    assert figure.layout.yaxis.categoryarray == ("best", "no. 2") and figure.layout.yaxis.autorange == "reversed"
    assert figure.layout.xaxis.range[1] > 46.0 and figure.layout.xaxis.title.text == "s"


def test_a_step_that_takes_much_longer_is_cut_and_named() -> None:
    long, longer = (plans.make_estimate(time=StepTime(compute=seconds)) for seconds in (60.0, 600.0))
    figure = draw_times({"best": ESTIMATE, "no. 2": long, "no. 3": longer})
    assert figure.layout.xaxis.range[1] == pytest.approx(1.06 * 69.0)
    assert [(note.y, note.text) for note in figure.layout.annotations] == [("no. 3", "<b>10 min 00 s →</b>")]


def test_long_steps_are_in_minutes() -> None:
    figure = draw_times({"closest": plans.make_estimate(time=StepTime(compute=6000.0))})
    assert figure.layout.xaxis.title.text == "min" and figure.data[0].x[0] == pytest.approx(100.0)


def test_stages_are_those_of_a_pipeline() -> None:
    assert draw_memory(plans.make_estimate(Layout(dp_shard=64))).layout.yaxis.categoryarray == ("fullest",)


def test_short_steps_are_in_milliseconds() -> None:
    small = plans.single().best
    assert small is not None
    figure = draw_times({"best": small.estimate})
    assert figure.layout.xaxis.title.text == "ms" and figure.data[0].x[0] == pytest.approx(2.1)


def test_the_timeline_has_every_action_at_its_time() -> None:
    timeline = make_timeline(ESTIMATE.choice, ESTIMATE.time)
    assert timeline is not None
    figure = draw_timeline(timeline, 4)
    drawn = sum(len(trace.x) for trace in figure.data)
    assert drawn == len(timeline.bars) + 4 * len(timeline.after)
    first, second = (trace for trace in figure.data if trace.customdata and "forward" in trace.customdata[0])
    assert (first.marker.opacity, second.marker.opacity) == (1.0, 0.6)
    assert first.customdata[0] == "forward of micro-step 0, stage 0" and first.base[0] == 0.0
    assert figure.layout.xaxis.range[1] == pytest.approx(timeline.seconds + 0.55)
    ends = [base + x for trace in figure.data for base, x in zip(trace.base, trace.x, strict=True)]
    assert max(ends) == pytest.approx(figure.layout.xaxis.range[1], rel=1e-3)


def test_nothing_of_a_part_that_is_nought() -> None:
    assert [trace.name for trace in draw_memory(plans.make_estimate(memory=MemoryUse(weights=1e9))).data][:-1] == [
        "weights"
    ]
