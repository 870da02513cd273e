"""Turns alternate, and a loop is warm before its memory is watched."""

import gc
from collections.abc import Callable, Iterator

import torch

from allranks.benchmarking.measure import STEPS_A_TURN, WARM_STEPS, WARM_TURNS, num_steps, take_turns, warm_up
from allranks.benchmarking.memory_watch import allocated_bytes

CPU = torch.device("cpu")


def _named(name: str, seen: list[str]) -> Iterator[Callable[[], float]]:
    while True:
        seen.append(name)
        yield lambda: 1.0


def test_turns_alternate_and_warm_ones_do_not_count() -> None:
    seen: list[str] = []
    calls = {"barrier": 0, "finish": 0}

    def count(name: str) -> Callable[[], None]:
        return lambda: calls.__setitem__(name, calls[name] + 1)

    pairs = take_turns(_named("raw", seen), _named("ours", seen), 3, barrier=count("barrier"), finish=count("finish"))
    assert len(pairs) == 3 and all(raw > 0 and ours > 0 for raw, ours in pairs)
    order = ["raw", "ours", "ours", "raw"] * ((WARM_TURNS + 3) // 2)
    assert seen == [name for name in order for _ in range(STEPS_A_TURN)]
    assert calls == {"barrier": len(order), "finish": len(order)}


def test_a_side_is_warm_and_knows_its_first_loss() -> None:
    seen: list[int] = []

    def steps() -> Iterator[Callable[[], float]]:
        kept = torch.ones(1_000_000)
        for number in range(num_steps(0)):
            seen.append(number)
            last = kept + kept  # a second while the one before is still there
            assert last.numel()
            yield lambda number=number: 10.0 + number  # type: ignore[misc]

    gc.collect()  # what earlier tests have left must not go meanwhile
    side = warm_up(steps, CPU)
    assert side.first_loss == 10.0
    assert seen == list(range(WARM_STEPS + 1))
    assert 12e6 <= side.peak_bytes < 13e6 if allocated_bytes() else side.peak_bytes == 0
    next(side.steps)
