"""Pure functions from journal lines to values, also from lines that say less than they should."""

import math
from typing import Any

from allranks.reporting.history import (
    find_attempts,
    find_decisions,
    find_pace,
    find_verdicts,
    loss_curve,
    number,
    numbers,
    peak_memory,
    seconds_by_cause,
)
from allranks.verdict import Decision, Verdict


def step(number: int, loss: float | None = 1.0, seconds: float = 0.5, **more: object) -> dict[str, Any]:
    return {"t": 100.0 + number, "event": "step", "step": number, "samples": 32 * number, "loss": loss} | {
        "seconds": seconds,
        **more,
    }


def start(attempt: int, **more: object) -> dict[str, Any]:
    return {"t": 100.0 * attempt, "event": "start", "attempt": attempt, "world_size": 2, **more}


def test_number_reads_what_is_spelled() -> None:
    assert number({"loss": 2}, "loss") == 2.0
    assert number({"loss": None, "loss_text": "-inf"}, "loss") == -math.inf
    assert number({"loss": None}, "loss") is None
    assert number({"loss": "2.0"}, "loss") is None


def test_numbers_reads_a_table() -> None:
    table = {"a": 1.0, "b": None, "b_text": "nan", "c": "word"}
    found = numbers({"metrics": table}, "metrics")
    assert list(found) == ["a", "b"]
    assert math.isnan(found["b"])
    assert numbers({"metrics": 3}, "metrics") == {}


def test_attempts_are_cut_at_each_start() -> None:
    events = [start(1, device="cpu"), step(1), step(2), start(2, world_size=3), step(2), {"t": 300.0, "event": "end"}]
    first, second = find_attempts(events)
    assert (first.number, first.started, first.ended, first.last_step, first.reason) == (1, 100.0, 102.0, 2, None)
    assert (first.world_size, first.device, second.world_size, second.device) == (2, "cpu", 3, "")
    assert (second.number, second.ended, second.reason) == (2, 300.0, "")


def test_the_curve_is_made_of_means_of_equal_stretches() -> None:
    curve = loss_curve([step(n, 100.0 - n) for n in range(1, 97)])
    assert curve is not None
    assert len(curve.points) == 48
    assert curve.points[0] == (2, 98.5)
    assert curve.points[-1] == (96, 4.5)
    assert (curve.first, curve.last, curve.lowest, curve.lowest_step) == (99.0, 4.0, 4.0, 96)
    assert curve.num_not_finite == 0


def test_a_loss_that_is_not_finite_hides_nothing() -> None:
    curve = loss_curve([step(1, None, loss_text="nan"), step(2, 3.0), step(3, 2.0), step(4, None, loss_text="inf")])
    assert curve is not None
    assert (curve.lowest, curve.lowest_step, curve.num_not_finite) == (2.0, 3, 2)
    assert curve.last == math.inf
    assert math.isnan(curve.points[0][1])


def test_no_curve_without_a_loss() -> None:
    assert loss_curve([]) is None
    assert loss_curve([step(1, None)]) is None


def test_the_pace_is_a_median_without_the_first_step() -> None:
    steps = [step(1, seconds=60.0), step(2, seconds=0.5), step(3, seconds=0.25), step(4, seconds=1.0)]
    assert find_pace(steps) == (0.5, 64.0)
    assert find_pace(steps[:1]) == (None, None)
    assert find_pace([step(1), step(2, seconds=0.0)]) == (None, None)


def test_a_gap_in_the_steps_makes_no_rate() -> None:
    assert find_pace([step(1), step(9)]) == (0.5, None)


def test_the_time_of_an_attempt_without_an_end_is_not_split() -> None:
    end = {"t": 9.0, "event": "end", "seconds": {"input": 1.0, "checkpoint": 2.0}}
    events = [start(1), step(1), end, start(2), step(2), step(3), start(3), step(4), end]
    assert seconds_by_cause(events) == ({"input": 2.0, "checkpoint": 4.0}, 1.0)


def test_the_peak_is_by_rank_and_of_the_whole_run() -> None:
    journals = {
        1: [step(1, memory_bytes=7), step(2, memory_bytes=9), step(3)],
        0: [step(1)],
        2: [step(1, memory_bytes=5)],
    }
    assert peak_memory(journals) == {1: 9, 2: 5}


def test_decisions_that_every_attempt_repeats_stand_once() -> None:
    line = {"t": 1.0, "event": "decision", "what": "backend gloo", "because": "no CUDA"}
    assert find_decisions([line, step(1), line | {"what": "x"}, line]) == (
        Decision("backend gloo", "no CUDA"),
        Decision("x", "no CUDA"),
    )


def test_verdicts_of_all_ranks_stand_in_the_order_of_time() -> None:
    late = {"t": 2.0, "event": "verdict", "kind": "S1", "what": "late", "evidence": ["a", 3], "next": "wait"}
    early = {"t": 1.0, "event": "verdict", "what": "early", "evidence": None}
    assert find_verdicts([[late], [step(1), early]]) == (
        Verdict("", "early", (), ""),
        Verdict("S1", "late", ("a", "3"), "wait"),
    )
