from itertools import pairwise

import pytest

from allranks.errors import ConfigError
from allranks.fault_points import DISK_POINTS, POINTS
from allranks.surviving.fault_schedule import STEPS_APART, Choice, draw, parse_choices

NUM_STEPS = 200
PASSED = {
    rank: {
        "start": {0: 1},
        "forward": {step: 2 for step in range(1, NUM_STEPS + 1)},
        "agreement": {step: 1 for step in range(NUM_STEPS + 1)},
        "checkpoint.write": {step: 9 for step in range(5, NUM_STEPS + 1, 5)},
        **({} if rank else {"checkpoint.renamed": {step: 1 for step in range(5, NUM_STEPS + 1, 5)}}),
    }
    for rank in (0, 1)
}


def test_choices() -> None:
    assert parse_choices("forward") == (Choice("forward", "kill", named=True),)
    assert parse_choices("forward:stop, evaluate") == (
        Choice("forward", "stop", named=True),
        Choice("evaluate", "kill", named=True),
    )
    assert {choice.point for choice in parse_choices(None)} == set(POINTS) - {"data.worker"}
    assert {choice.point for choice in parse_choices("*:eio")} == DISK_POINTS
    anywhere = {"kill", "stop", "segfault", "exit", "raise"}
    assert {choice.kind for choice in parse_choices("forward:*")} == {*anywhere, "disconnect"}
    assert {choice.kind for choice in parse_choices("start:*")} == anywhere
    assert parse_choices("data.worker:*") == (Choice("data.worker", "kill"),)
    assert "data.worker" not in {choice.point for choice in parse_choices("*:stop")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foward", "no such point 'foward'; did you mean 'forward'"),
        ("forward:kil", "no such kind 'kil'; did you mean 'kill'"),
        ("forward:enospc", "nothing is written at forward; enospc goes with checkpoint.stage, "),
        ("start:disconnect", "at start a process has no connection yet"),
        ("data.worker:stop", "'data.worker:stop': a process that loads data can only be killed"),
        ("qqq", "no such point 'qqq'; they are start, resume, "),
    ],
)
def test_what_is_no_choice(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_choices(text)
    assert message in str(caught.value)


def test_a_seed_draws_one_schedule_and_another_seed_another() -> None:
    choices = parse_choices(None)
    assert draw(PASSED, choices, 30, seed=1) == draw(PASSED, choices, 30, seed=1) != draw(PASSED, choices, 30, seed=2)


def test_faults_are_drawn_where_the_run_passes_and_never_two_at_once() -> None:
    faults = draw(PASSED, parse_choices(None), 60, seed=0)
    assert [fault.number for fault in faults] == list(range(60))
    mains = [fault for fault in faults if fault.after is None]
    for fault in mains:
        assert 1 <= fault.visit <= PASSED[fault.rank][fault.point][fault.step]
    steps = [fault.step for fault in mains]
    assert all(later - earlier >= STEPS_APART for earlier, later in pairwise(steps))
    assert {fault.point for fault in mains} == {"forward", "agreement", "checkpoint.write", "checkpoint.renamed"}
    assert {fault.rank for fault in faults} == {0, 1}


def test_some_come_while_the_run_recovers_from_the_one_before() -> None:
    faults = draw(PASSED, parse_choices(None), 60, seed=0)
    followers = [fault for fault in faults if fault.after is not None]
    assert len(followers) == 10
    for fault in followers:
        assert fault.after == fault.number - 1 and faults[fault.after].after is None
        assert fault.point == "start" or (fault.point == "resume" and fault.step > 5)


def test_only_points_of_a_recovery_follow_kills() -> None:
    faults = draw(PASSED, parse_choices("resume"), 6, seed=0)
    assert [fault.point for fault in faults] == ["agreement", "resume"] * 3


@pytest.mark.parametrize("kind", ["exit", "raise"])
def test_nothing_follows_what_ends_the_run(kind: str) -> None:
    faults = draw(PASSED, parse_choices(f"*:{kind}"), 15, seed=0)
    assert len(faults) == 15 and all(fault.after is None for fault in faults)


def test_a_point_that_never_happens_is_refused_with_those_that_do() -> None:
    message = "evaluate never happens in this program: it passes start, resume, forward, agreement, checkpoint.write"
    with pytest.raises(ConfigError, match=message):
        draw(PASSED, parse_choices("evaluate"), 1, seed=0)
    draw(PASSED, parse_choices("*"), 1, seed=0)
    without = {0: {"forward": {1: 1}}}
    with pytest.raises(ConfigError, match="resume never happens"):
        draw(without, parse_choices("resume"), 1, seed=0)


def test_one_process_has_no_connections() -> None:
    alone = {0: PASSED[0]}
    assert {one.kind for one in draw(alone, parse_choices("forward:disconnect,forward"), 9, seed=0)} == {"kill"}
    with pytest.raises(ConfigError, match="one process has no connections that could be cut: give --nproc 2"):
        draw(alone, parse_choices("*:disconnect"), 1, seed=0)


def test_too_many_are_refused_with_how_many_fit() -> None:
    with pytest.raises(ConfigError, match="give --kills 40, more train"):
        draw(PASSED, parse_choices("checkpoint.write"), 41, seed=0)
    assert len(draw(PASSED, parse_choices("checkpoint.write"), 40, seed=0)) == 40
