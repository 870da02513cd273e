"""The picture of a sharded step shows the lines of the page, which tests/cli/test_sharding.py holds to the command."""

import re
from pathlib import Path

from tools.step_picture import draw_step, read_events

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "sharding.md").read_text()


def test_every_line_of_the_page_is_an_event() -> None:
    events = read_events(PAGE)
    assert events[0] == ("forward", "gather", "the rest", "65.8 kB")
    assert {event.what for event in events} == {"gather", "compute", "drop", "reduce-scatter"}
    assert [event.unit for event in events if event.what == "reduce-scatter"] == ["layers.1", "layers.0", "the rest"]
    assert [event.phase for event in events] == sorted((event.phase for event in events), reverse=True)


def test_every_event_is_drawn_in_its_lane_one_after_the_other() -> None:
    events, picture = read_events(PAGE), draw_step(PAGE)
    boxes = re.findall(r'<rect class="([a-z-]{2,})" x="(\d+)" y="(\d+)"', picture)
    assert [what for what, _, _ in boxes] == [event.what for event in events]
    places = [int(x) for _, x, _ in boxes]
    assert places == sorted(set(places))
    lanes = {event.unit: y for event, (_, _, y) in zip(events, boxes, strict=True)}
    assert len(set(lanes.values())) == len(lanes)
    assert all(lanes[event.unit] == y for event, (_, _, y) in zip(events, boxes, strict=True))


def test_a_lane_is_shaded_while_its_unit_is_whole() -> None:
    shades = re.findall(r'<rect class="w" x="(\d+)" y="\d+" width="(\d+)"', draw_step(PAGE))
    gathers = [event for event in read_events(PAGE) if event.what == "gather"]
    assert len(shades) == len(gathers)  # each is dropped again in the step
