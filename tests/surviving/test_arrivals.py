"""Who keeps the others waiting, from the moments at which ranks come to their collectives."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.surviving.arrivals import Key, Lag, Moments, find_slowest, read_arrivals

MS = 1_000_000
Work = Callable[[int, int], Sequence[tuple[str, float, bool]]]
"""(rank, step) -> its collectives: the group, the milliseconds of work before it, and whether it waits there."""


def run(work: Work, *, ranks: int = 4, steps: int = 20, groups: Mapping[str, int] | None = None) -> dict[int, Moments]:
    """The moments of a made-up run. `groups`: name -> how many neighbours share one; a name that is not in it: all."""
    clock = dict.fromkeys(range(ranks), 0.0)
    moments: dict[int, dict[Key, int]] = {rank: {} for rank in range(ranks)}
    for step in range(steps):
        plans = {rank: work(rank, step) for rank in range(ranks)}
        pending = dict.fromkeys(range(ranks), 0.0)
        for number in range(len(plans[0])):
            arrived: dict[int, float] = {}
            for rank in range(ranks):
                arrived[rank] = clock[rank] + plans[rank][number][1]
            for rank in range(ranks):
                name, _, waits = plans[rank][number]
                size = (groups or {}).get(name, ranks)
                members = range(rank // size * size, rank // size * size + size)
                key = (f"{name}{rank // size}", step * len(plans[0]) + number)
                moments[rank][key] = round(arrived[rank] * MS)
                done = max(arrived[member] for member in members)
                pending[rank] = max(pending[rank], done)
                clock[rank] = max(arrived[rank], pending[rank]) if waits else arrived[rank]
    return dict(moments)


def one_slow(slow: int, factor: float, *, waits: bool = True) -> Work:
    def work(rank: int, step: int) -> list[tuple[str, float, bool]]:
        times = factor if rank == slow else 1.0
        return [("dp", 20 * times, waits), ("dp", 10 * times, waits), ("dp", 5 * times, True)]

    return work


def test_ranks_that_do_alike_are_all_well() -> None:
    assert find_slowest(run(one_slow(0, 1.0))) is None
    assert find_slowest(run(one_slow(2, 1.1))) is None, "a tenth is nothing to tell of"


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_takes_twice_as_long_is_found(waits: bool) -> None:
    """Whether the others wait at each collective, or only at the last of a step (buckets of gradients)."""
    found = find_slowest(run(one_slow(2, 2.0, waits=waits)))
    assert found is not None and found.rank == 2
    assert found.busy == pytest.approx(1.0, abs=0.05) and found.others == pytest.approx(0.5, abs=0.05)
    assert found.lead == pytest.approx(0.5, abs=0.05)


def test_who_waits_for_the_slow_one_and_so_keeps_others_waiting_is_not_blamed() -> None:
    """tp=2 inside of dp=2: rank 1 is slow, rank 0 waits for it, and ranks 2 and 3 wait for both."""

    def work(rank: int, step: int) -> list[tuple[str, float, bool]]:
        return [("tp", 30.0 if rank == 1 else 10.0, True), ("tp", 5.0, True), ("dp", 2.0, True)]

    found = find_slowest(run(work, groups={"tp": 2}))
    assert found is not None and found.rank == 1 and found.lead > 0.4


def test_what_takes_long_once_makes_no_rank_slow() -> None:
    def work(rank: int, step: int) -> list[tuple[str, float, bool]]:
        return [("dp", 500.0 if rank == 0 and step == 4 else 10.0, True)]

    assert find_slowest(run(work, steps=40)) is None


def test_what_was_before_is_not_looked_at() -> None:
    def work(rank: int, step: int) -> list[tuple[str, float, bool]]:
        return [("dp", 20.0 if rank == 1 and step >= 40 else 10.0, True)]

    moments = run(work, steps=80)
    assert find_slowest(moments) is None
    found = find_slowest(moments, since=moments[0][("dp0", 40)])
    assert found is not None and found.rank == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_little_is_nothing(ranks: int) -> None:
    few = run(one_slow(0, 3.0), ranks=ranks, steps=2)
    assert find_slowest(few) is None
    assert find_slowest({}) is None
    apart: dict[int, Moments] = {0: {("a", n): n for n in range(20)}, 1: {("a", n): 100 + n for n in range(20, 40)}}
    assert find_slowest(apart) is None, "they have no time in common"


@given(st.integers(0, 3), st.floats(1.8, 5.0), st.integers(1, 3), st.booleans())
def test_the_slow_one_is_found_whichever_it_is(slow: int, factor: float, collectives: int, waits: bool) -> None:
    def work(rank: int, step: int) -> list[tuple[str, float, bool]]:
        took = 10.0 * (factor if rank == slow else 1.0)
        return [("dp", took, waits)] * collectives + [("dp", 0.5, True)]

    found = find_slowest(run(work))
    assert found is not None and found.rank == slow
    # Who comes to a bucket's end and goes on without having waited looks as if it had: then it seems to work less.
    assert found.lead >= 1 - 1 / factor - 0.1 and (not waits or found.lead == pytest.approx(1 - 1 / factor, abs=0.1))


def test_what_a_worker_wrote_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    groups = [{"axis": "dp_shard", "ranks": [1, 3]}, {"axis": "pp", "ranks": [2, 3]}]
    path.write_text(json.dumps({"groups": groups, "arrivals": [["7", 1, 5], ["7", 2, 9]]}))
    told = read_arrivals(path, 3)
    assert told is not None and (told.stage, told.moments) == (1, {("7", 1): 5, ("7", 2): 9})
    assert not path.exists() and read_arrivals(path, 3) is None
    for text in ("", "{}", "[]", '{"groups": [], "arrivals": [[1]]}'):
        path.write_text(text)
        assert read_arrivals(path, 0) is None


def test_the_lead_is_what_everybody_loses() -> None:
    assert Lag(1, 0.75, 0.25).lead == 0.5
