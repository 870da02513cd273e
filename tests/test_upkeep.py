"""Upkeep as a value."""

from allranks.layout import Layout
from allranks.plan import Choice
from allranks.upkeep import Upkeep


def test_a_run_that_says_nothing_saves_at_its_end_and_nobody_has_measured_its_samples() -> None:
    assert Upkeep() == Upkeep(save_every=0, beside=False, sample_seconds=None, workers=0, reads_all=False)


def test_choices_of_different_upkeep_are_different() -> None:
    often, seldom = (Choice(Layout(), 8, 1, upkeep=Upkeep(save_every=every)) for every in (10, 1000))
    assert often != seldom and hash(often) == hash(seldom)
