"""The search finds what weighing every choice finds, and weighs far fewer."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.cluster import Cluster
from allranks.layout import Layout
from allranks.model_profile import ModelProfile
from allranks.named_models import find_model
from allranks.plan import Choice, Estimate, Span
from allranks.planning.choices import Space, every_choice
from allranks.planning.estimate import estimate
from allranks.planning.estimator import Fit, Formulas
from allranks.planning.hardware import find_cluster
from allranks.planning.search import Found, Search, front, rank
from tests.planning.profiles import cluster, decoder
from tests.planning.questions import ask


class Told:
    """An Estimator that is told what all costs."""

    def __init__(self, estimate: Callable[[ModelProfile, Cluster, Choice], Estimate]) -> None:
        self.estimate = self.fit = estimate


HOSTS: dict[str, Any] = {"host_memory_bytes": 2e12, "host_bandwidth": 20e9}


def both(space: Space) -> tuple[Found, Found]:
    """What the search finds, and what weighing all of it finds."""
    return Search(space).run(), Search(space).weigh(every_choice(space))


def assert_same_best(space: Space) -> tuple[Found, Found]:
    found, every = both(space)
    assert (found.best is None) == (every.best is None)
    if found.best is not None and every.best is not None:
        assert rank(found.best) == rank(every.best), (found.best.choice, every.best.choice)
    return found, every


@pytest.mark.sample(3)
@pytest.mark.parametrize("memory", [16e9, 40e9, 80e9])
@pytest.mark.parametrize(
    ("name", "where", "batch", "seq"),
    [
        ("gpt2-xl", "2x4:a100-40g", 32, 1024),
        ("llama3-8b", "1x8:h100", 24, 8192),
        ("mixtral-8x7b", "1x4:h100", 16, 4096),
        pytest.param("llama3-8b", "2x8:a100-80g", 32, 4096, marks=pytest.mark.full),
        pytest.param("mixtral-8x7b", "2x8:h100", 16, 4096, marks=pytest.mark.full),
    ],
)
def test_the_best_of_all_is_found(name: str, where: str, batch: int, seq: int, memory: float) -> None:
    there = find_cluster(where)
    there = replace(there, device=replace(there.device, memory_bytes=memory), **HOSTS)
    found, every = assert_same_best(Space({"bfloat16": find_model(name).profile(seq)}, there, batch))
    assert found.num_choices < every.num_choices


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "100b"])
@pytest.mark.parametrize("where", ["8x8:a100-80g", "8x8:a100", "8x8:h100@ethernet100"])
def test_the_best_of_all_is_found_on_64_devices(name: str, where: str) -> None:
    assert_same_best(Space({"bfloat16": find_model(name).profile(4096)}, find_cluster(where), 128))


@pytest.mark.full
@given(
    layers=st.sampled_from([2, 3, 8, 12]),
    heads=st.sampled_from([4, 6, 8]),
    vocab=st.sampled_from([256, 50257]),
    seq=st.sampled_from([32, 96, 2048]),
    experts=st.sampled_from([0, 4]),
    nodes=st.sampled_from([1, 2]),
    devices=st.sampled_from([2, 3, 4]),
    batch=st.integers(4, 40),
    memory=st.sampled_from([2.05e9, 2.2e9, 3e9, 80e9]),
    slow=st.sampled_from([1.0, 0.01]),
    hosts=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_the_best_of_all_is_found_for_any_model(
    layers: int, heads: int, vocab: int, seq: int, experts: int, nodes: int, devices: int, batch: int, memory: float,
    slow: float, hosts: bool,
) -> None:  # fmt: skip
    profile = decoder(layers=layers, heads=heads, hidden=16 * heads, vocab=vocab, seq=seq, experts=experts)
    there = cluster(nodes, devices, memory_bytes=memory, **({} if hosts else {"host_memory_bytes": None}))
    there = replace(there, between=replace(there.between, bandwidth=slow * there.between.bandwidth))
    assert_same_best(Space({"bfloat16": profile, "float32": replace(profile, precision="float32")}, there, batch))


def test_parameters_on_the_host_are_searched_as_exactly() -> None:
    """Where the least shared layout waits the longest for its host, the most shared ones are weighed all the same."""
    question = ask("llama3-70b", "8:a100-80g", 64, micro_batch=1, modes={"offload": "parameters"})
    found = Search(question.space()).run().best
    every = Search(question.space()).weigh(every_choice(question.space())).best
    assert found is not None and every is not None and found == every


def test_of_several_precisions_the_fastest_is_found() -> None:
    shape = find_model("gpt2")
    open_ones = {name: shape.profile(1024, name) for name in ("float32", "bfloat16")}
    found, _ = assert_same_best(Space(open_ones, find_cluster("4:a100-80g"), 16))
    assert found.best is not None and found.best.choice.precision == "bfloat16"


def test_a_mode_that_the_user_fixed_is_kept() -> None:
    space = Space(
        {"bfloat16": find_model("gpt2").profile(1024)}, find_cluster("4:a100-80g"), 16,
        modes={"recompute": "full", "sharding": "grad_op", "offload": "none", "schedule": "gpipe"},
    )  # fmt: skip
    found, every = assert_same_best(space)
    for estimates in (found.estimates, every.estimates):
        assert {choice.layout.recompute for choice in estimates} == {"full"}
        assert {choice.layout.sharding for choice in estimates if choice.layout.dp_shard > 1} == {"grad_op"}
        assert {choice.layout.schedule for choice in estimates if choice.layout.pp > 1} == {"gpipe"}


def test_a_layout_that_the_user_wrote_is_weighed_alone() -> None:
    layout = Layout(dp_shard=2, tp=2, recompute="full")
    space = Space({"bfloat16": find_model("gpt2").profile(1024)}, find_cluster("4:a100-80g"), 16, layout=layout)
    found = Search(space).run()
    assert {choice.layout for choice in found.estimates} == {layout}
    assert [choice.micro_batch for choice in found.estimates] == [1, 2, 4, 8]
    assert found.best is not None


def test_a_written_layout_that_no_rule_lets_in_is_refused() -> None:
    space = Space({"bfloat16": find_model("gpt2").profile(1024)}, find_cluster("10:a100-80g"), 20, layout=Layout(tp=10))
    found = Search(space).run()
    assert found.best is None and found.nearest is None
    assert [refusal.because for refusal in found.refusals.values()] == [
        "tp=10 does not divide 12 heads; tp can be 1, 2, 3, 4, 6, 12"
    ]


def test_where_nothing_fits_the_nearest_has_the_least_memory() -> None:
    there = find_cluster("1x2:a100-40g")
    space = Space({"bfloat16": find_model("llama3-70b").profile(2048)}, there, 8)
    found, every = both(space)
    assert found.best is None
    assert found.nearest is not None and every.nearest is not None
    assert found.nearest.peak_bytes.high == min(one.peak_bytes.high for one in every.estimates.values())


def test_what_would_fail_is_the_nearest_only_where_nothing_else_is_left() -> None:
    """It may take the least memory of all: no change of memory helps it."""
    there = find_cluster("1x2:a100-40g")
    space = Space({"bfloat16": find_model("llama3-70b").profile(2048)}, there, 8)
    least = Search(space).run().nearest
    assert least is not None

    def told(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Estimate:
        found = estimate(profile, cluster, choice)
        return replace(found, fault="x") if choice == least.choice else found

    found = Search(space, Told(told)).run().nearest
    assert found is not None and not found.fault and found.peak_bytes.high > least.peak_bytes.high
    alone = Search(space, Told(lambda *asked: replace(estimate(*asked), fault="x"))).run().nearest
    assert alone is not None and alone.choice == least.choice


def test_where_recompute_takes_more_than_it_saves_the_others_are_looked_at() -> None:
    """Of few blocks `full` may need the most: it works on a whole block beside what it keeps."""

    def working(profile: ModelProfile, where: Cluster, choice: Choice) -> Estimate:
        found = estimate(profile, where, choice)
        size = (1.2 if choice.layout.recompute == "full" else 0.8) * found.capacity_bytes
        return replace(found, peak_bytes=Span(size, size, size))

    space = Space({"bfloat16": decoder()}, cluster(1, 4), 16)
    found = Search(space, Told(working)).run()
    every = Search(space, Told(working)).weigh(every_choice(space))
    assert found.best is not None and every.best is not None
    assert rank(found.best) == rank(every.best)


def test_nobody_asks_how_long_it_takes_what_does_not_fit() -> None:
    """But of the plain member of a group, which says how long the others take at least."""
    there = find_cluster("1x8:a100-40g")
    found = Search(Space({"bfloat16": find_model("llama3-8b").profile(4096)}, there, 32)).run()
    timed = [one for one in found.estimates.values() if not one.fits]
    assert {one.choice.layout.dp_shard for one in timed} == {1}
    unfit = [choice for choice, fit in found.fits.items() if not fit.fits]
    assert not set(unfit) & set(found.estimates) - {one.choice for one in timed}
    assert len(unfit) > len(timed) and found.num_choices == len({*found.fits, *found.estimates})


def test_micro_steps_that_are_declared_fix_the_micro_batch() -> None:
    space = Space({"bfloat16": decoder(stateful=("norm",))}, cluster(1, 4), 32, micro_steps=2)
    found, _ = assert_same_best(space)
    assert {choice.micro_steps for choice in found.estimates} == {2}


def test_of_equally_fast_ones_the_one_with_less_memory_is_the_best() -> None:
    layouts = [Layout(dp_replicate=4), Layout(dp_shard=4)]

    def as_fast(profile: ModelProfile, where: Cluster, choice: Any) -> Estimate:
        size = 4e9 if choice.layout.dp_shard == 1 else 1e9
        return replace(template, choice=choice, peak_bytes=Span(size, size, size), step_seconds=Span(1.0, 1.0, 1.0))

    space = Space({"bfloat16": decoder()}, cluster(1, 4), 16, micro_batch=4, layout=layouts[0])
    template = next(iter(Search(space).run().estimates.values()))
    search = Search(space, Told(as_fast))
    for layout in layouts:
        search.estimate(replace(template.choice, layout=layout))
    assert search.found.best is not None and search.found.best.choice.layout == layouts[1]


def test_the_front_gives_up_time_for_memory() -> None:
    found = Search(Space({"bfloat16": find_model("llama3-8b").profile(4096)}, find_cluster("8:a100-80g"), 64)).run()
    fitting = [one for one in found.estimates.values() if one.fits]
    shown = front(fitting)
    assert shown[0] == found.best
    for faster, slower in pairwise(shown):
        assert faster.step_seconds.expected <= slower.step_seconds.expected
        assert faster.peak_bytes.high > slower.peak_bytes.high
    for one in fitting:
        assert any(rank(other) <= rank(one) and other.peak_bytes.high <= one.peak_bytes.high for other in shown)


@pytest.mark.parametrize(("share", "fits"), [(250e9, True), (1e8, False)])
def test_offload_is_searched_where_asked_and_held_to_the_host_of_the_vendor(share: float, fits: bool) -> None:
    modes = {"recompute": "full", "sharding": "full"}
    asked = ask("llama3-8b", "8:a100-40g", 64, micro_batch=1, modes=modes)
    there = replace(asked.cluster, device=replace(asked.cluster.device, host_memory_bytes=share))
    by_itself = Search(asked.on(there).space()).run()
    assert {choice.layout.offload for choice in (*by_itself.estimates, *by_itself.fits)} == {"none"}
    found, every = both(replace(asked, modes={**modes, "offload": "activations"}).on(there).space())
    assert (found.best is not None) is (every.best is not None) is fits
    if found.best is not None and every.best is not None:
        assert rank(found.best) == rank(every.best) and found.best.host_bytes <= 0.8 * 8 * share


class Counted:
    """The planner's formulas, and how often they were asked."""

    def __init__(self) -> None:
        self.formulas, self.estimates, self.fits = Formulas(), 0, 0

    def estimate(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Estimate:
        """Bytes, seconds and traffic."""
        self.estimates += 1
        return self.formulas.estimate(profile, cluster, choice)

    def fit(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Fit:
        """Bytes alone."""
        self.fits += 1
        return self.formulas.fit(profile, cluster, choice)


@pytest.mark.parametrize(
    ("model", "where", "batch", "estimates", "fits"),
    [("llama3-70b", "8x8:a100-80g", 512, 1_310, 2_240), ("llama3-405b", "2048x8:h100", 2048, 3_850, 4_500)],
)
def test_what_a_search_weighs_is_bounded(model: str, where: str, batch: int, estimates: int, fits: int) -> None:
    """In calls of the estimator, a tenth above what they are: seconds depend on who else is at the machine."""
    counted = Counted()
    found = Search(ask(model, where, batch, seq=8192).space(), counted).run()
    assert found.best is not None
    assert 0.5 * estimates < counted.estimates <= estimates
    assert 0.5 * fits < counted.fits <= fits
