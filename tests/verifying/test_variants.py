"""What another order of samples does is told from what rounding does, and stays out of the bounds."""

from copy import deepcopy

import pytest
import torch

from allranks.verifying.recording import Part, RunRecord
from allranks.verifying.variants import NOISY, ORDERED, Seen, variants_of
from tests.verifying.records import one_device


class Runs:
    """One device whose runs are moved by so much of every value: in another order, and in their own.

    Attributes:
        asked: of each run (shake, shuffled, ulp).
        looked: how often it was asked what a step does.
    """

    def __init__(
        self, by_order: float, by_ulp: float, lowest: torch.dtype = torch.float64, draws: bool = False, step: int = 0
    ) -> None:
        self.by_order, self.by_ulp, self.seen, self.step = by_order, by_ulp, Seen(lowest, draws), step
        self.asked: list[tuple[int, bool, torch.dtype | None]] = []
        self.looked = 0

    def __call__(self, shake: int, shuffled: bool, ulp: torch.dtype | None) -> RunRecord:
        self.asked.append((shake, shuffled, ulp))
        run = one_device()
        moved = run.steps[self.step].gradients
        for name, part in moved.items():
            moved[name] = Part(None, part.value * (1 + (self.by_order if shuffled else self.by_ulp) * shake))
        return run

    def look(self) -> Seen:
        self.looked += 1
        return self.seen


def shuffles(runs: Runs) -> tuple[list[bool], tuple[str, ...]]:
    """Which variants of `runs` are in another order, and the notes."""
    variants, notes = variants_of(one_device(), runs, runs.look)
    orders = []
    for variant in variants:
        value, first = variant.steps[runs.step].gradients["bias"].value, one_device().steps[runs.step].gradients["bias"]
        moved = abs(float((value / first.value)[0]) - 1)
        orders.append(abs(moved - runs.by_order) < 1e-12 or abs(moved - 2 * runs.by_order) < 1e-12)
    return orders, notes


def test_rounding_is_seen_in_another_order() -> None:
    runs = Runs(1e-13, 0.0)
    assert shuffles(runs) == ([True, True], ()) and runs.looked == 0
    assert runs.asked == [(1, True, None), (2, True, None)]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("lowest", [torch.float64, torch.float32])
def test_where_order_means_something_its_own_is_kept_and_told(step: int, lowest: torch.dtype) -> None:
    """Samples may be beside each other in a batch, or in the same place of the next one."""
    runs = Runs(0.3, 1e-7, lowest, step=step)
    assert shuffles(runs) == ([False, False], (ORDERED,))
    assert runs.asked[2:] == [(1, False, lowest), (2, False, lowest)]


@pytest.mark.parametrize(
    ("by_order", "by_ulp", "lowest"),
    [
        (1e-6, 0.0, torch.float32),  # sums of a part in float32
        (0.02, 0.0, torch.bfloat16),
        (0.3, 0.2, torch.float64),  # ties, that rounding turns over
    ],
)
def test_what_rounding_may_do_is_no_order(by_order: float, by_ulp: float, lowest: torch.dtype) -> None:
    assert shuffles(Runs(by_order, by_ulp, lowest)) == ([True, True], ())


def test_noise_that_goes_by_place_is_no_order() -> None:
    assert shuffles(Runs(0.01, 0.0, draws=True)) == ([True, True], (NOISY,))


def test_a_queue_in_the_order_of_samples_counts_and_what_is_zero_but_for_rounding_does_not() -> None:
    def varied(what: str, factor: float) -> tuple[str, ...]:
        def run(shake: int, shuffled: bool, ulp: torch.dtype | None) -> RunRecord:
            found = deepcopy(first)
            held = getattr(found.steps[0], what)
            name = next(iter(held))
            held[name] = Part(None, held[name].value * (factor if shuffled else 1.0))
            return found

        return variants_of(first, run, lambda: Seen(torch.float64, False))[1]

    first = one_device()
    assert varied("buffers", 0.5) == (ORDERED,)
    first.steps[0].raw["weight"] = Part(None, first.steps[0].raw["weight"].value * 1e-15)
    assert varied("raw", -1.0) == ()


def test_a_run_that_fails_in_another_order_is_left_out() -> None:
    def run(shake: int, shuffled: bool, ulp: torch.dtype | None) -> RunRecord:
        found = one_device()
        found.error = "it fails" if shake == 1 else ""
        return found

    assert len(variants_of(one_device(), run, lambda: Seen(torch.float64, False))[0]) == 1
