"""Which micro-steps are traced, what of them repeats, and what rests for each of them."""

import pytest

from allranks.config import resolve_config
from allranks.rehearsing.ledger import Stored, Stretch
from allranks.rehearsing.micro_steps import FewMicroSteps, fewer_micro_steps
from allranks.rehearsing.replay import Window
from allranks.rehearsing.shortening import NotShortened
from tests.rehearsing.tasks import Tokens, configured, rehearsed
from tests.rehearsing.test_dryrun import totals


def few_of(layout: str, world: int, *words: str) -> FewMicroSteps:
    return fewer_micro_steps(*configured(Tokens(), layout, world, *words))


@pytest.mark.parametrize(
    ("layout", "world", "few"),
    [
        ("single", 1, (3, 1)),
        ("pp=2", 2, (4, 1)),
        ("pp=3", 3, (6, 1)),
        ("pp=4", 4, (6, 1)),
        ("pp=2,schedule=interleaved", 2, (8, 4)),
        ("pp=4,schedule=gpipe", 4, (4, 0)),
        ("pp=2,schedule=gpipe", 2, (3, 0)),
        ("pp=2,schedule=zbv", 2, (16, 1)),
    ],
)
def test_how_many_are_traced(layout: str, world: int, few: tuple[int, int]) -> None:
    words = "train.global_batch=16", "train.micro_batch=1", "data.skip=16:32"
    found = few_of(layout, world, *words)
    assert (found.traced, found.period, found.number) == (*few, 16)
    assert found.config.train.global_batch == found.traced
    shortened = found.traced < 16
    assert (found.config.data.skip == "") is shortened
    assert fewer_micro_steps(found.config, configured(Tokens(), layout, world, *words)[1]).config is found.config


def test_a_pipeline_that_chooses_its_own_cut_is_told_how_many() -> None:
    found = few_of("pp=4", 4, "train.global_batch=64")
    assert (found.number, found.traced) == (8, 6)
    assert (found.config.train.micro_steps, found.config.train.global_batch) == (6, 48)
    assert few_of("pp=2", 2, "train.global_batch=8").number == few_of("pp=2", 2, "train.global_batch=8").traced


def test_a_deep_pipeline_is_shallow_where_enough_is_left_out() -> None:
    for number, traced, filling in ((8, 8, 0), (10, 10, 0), (11, 6, 5), (40, 6, 5)):
        found = few_of("pp=8", 8, f"train.global_batch={number}", "train.micro_batch=1")
        assert (found.traced, found.filling, found.shallow) == (traced, filling, filling > 0)


def stretches(*units: str) -> list[Stretch]:
    """ "F0" is the begin of a forward, "f0" a block in it, "B0" a backward's begin."""
    kinds = {"F": ("forward", ""), "f": ("forward", "layers.0"), "B": ("backward", ""), "b": ("backward", "layers.0")}
    return [Stretch(*kinds[unit[0]], int(unit[1:])) for unit in units]


def few(number: int, traced: int, period: int, filling: int = 0) -> FewMicroSteps:
    config = resolve_config(task_defaults={}, toml=None, overrides=[], layout="single")
    return FewMicroSteps(config, number, traced, period, filling)


def test_what_repeats() -> None:
    plain = stretches("F0", "f0", "B0", "b0", "F1", "f1", "B1", "b1", "F2", "f2", "B2", "b2")
    assert few(9, 3, 1).find_windows(plain) == (Window(4, 8, 7),)
    assert few(3, 3, 1).find_windows(plain) == ()
    first_of_two = stretches("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3")
    assert few(9, 4, 1).find_windows(first_of_two) == (Window(3, 5, 6),)
    deep = stretches("F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "F5", "B3", "B4", "B5")
    assert few(20, 6, 1, 4).find_windows(deep) == (Window(1, 2, 5), Window(6, 8, 11), Window(10, 11, 5))
    assert few(20, 6, 1, 4).find_windows(deep, 3) == (Window(1, 2, 2), Window(6, 8, 14), Window(10, 11, 2))
    assert few(20, 6, 1, 4).find_windows(deep, 4) == (Window(6, 8, 15),)
    two_each = stretches(*(f"F{n}" for n in range(8)))
    assert few(8, 4, 4).find_windows(two_each) == (Window(3, 7, 3),)
    apart = stretches("F0", "f0", "F1", "f1", "F2", "f2", "B0", "b0", "B1", "b1", "B2", "b2")
    assert few(9, 3, 0).find_windows(apart) == (Window(2, 4, 7), Window(8, 10, 7))


def test_what_is_not_as_expected_is_not_shortened() -> None:
    with pytest.raises(NotShortened):
        few(9, 3, 1).find_windows(stretches("F0", "F1", "B0", "B1"))
    with pytest.raises(NotShortened):
        few(9, 3, 0).find_windows(stretches("F0", "F1", "F2"))


def test_what_rests_for_each() -> None:
    batch, weights = Stored(8), Stored(100)
    assert few(9, 3, 1).grow([(batch, 8), (weights, 100)], [batch]) == [(batch, 24), (weights, 100)]


OF_EACH = 16
"""Bytes that a micro-step leaves on the last stage: its loss, here and in the sum."""
PIPELINES = [
    ("pp=2", 2), ("pp=2,schedule=interleaved", 2), ("pp=2,schedule=gpipe", 2), ("pp=4", 4), ("pp=2,dp_shard=2", 4),
    ("pp=3", 3), ("pp=5,recompute=full", 5), ("pp=6,dp_shard=2", 12),
    ("pp=2,tp=2,recompute=full", 4), ("pp=2,dp_replicate=2,schedule=interleaved", 4),
    ("pp=2,dp_shard=2,schedule=interleaved", 4), ("pp=2,dp_shard=2,schedule=gpipe,recompute=selective", 4),
]  # fmt: skip


def check(layout: str, world: int, rank: int, number: int) -> None:
    """One rank, with so many micro-steps."""
    task = Tokens(layers=4 if "interleaved" in layout else world)
    words = f"train.global_batch={number * (2 if 'dp_' in layout else 1)}", "train.micro_batch=1"
    short, full = (rehearsed(task, layout, world, *words, rank=rank, full=full) for full in (False, True))
    assert short.micro_steps == full.micro_steps == number
    assert len(short.sequence) < len(full.sequence)
    assert short.peak_bytes == pytest.approx(full.peak_bytes, rel=0.01)
    assert short.resting_bytes == pytest.approx(full.resting_bytes, abs=OF_EACH * number)
    assert short.moments[-1].live_bytes == pytest.approx(full.moments[-1].live_bytes, abs=OF_EACH * number)
    assert short.flops == full.flops
    assert totals(short) == totals(full)


def test_a_pipeline_of_few_micro_steps_is_that_of_many() -> None:
    check("pp=2", 2, 0, 5)


@pytest.mark.full
def test_a_deep_pipeline_is_that_of_one_with_fewer_micro_steps() -> None:
    check("pp=5", 5, 1, 9)


@pytest.mark.full
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("layout", "world"), PIPELINES)
def test_a_pipeline_of_few_micro_steps_is_that_of_many_on_every_axis(layout: str, world: int, last: bool) -> None:
    check(layout, world, world - 1 if last else 0, 12)
