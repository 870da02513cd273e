"""A step is refused where the data's own cut refuses it, before anybody starts."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.config_sections import TrainConfig
from allranks.data.cut import Cut, cut_step
from allranks.errors import ConfigError, LayoutError
from allranks.even_cut import MOST_MICRO_STEPS
from allranks.layout import Layout
from allranks.plan import Choice, Refusal
from allranks.planning.micro_step_rules import OF_MICRO_BATCH, micro_steps, name_data, name_stages, pipeline_batch
from allranks.planning.rules import RULES, batch
from tests.planning.profiles import choose, cluster, decoder

SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.sampled_from(SCHEDULES), st.data()
)
def test_batches_are_refused_where_the_data_refuses_them(
    size: int, replicas: int, shards: int, pp: int, schedule: str, data: st.DataObject
) -> None:
    layout = Layout(dp_replicate=replicas, dp_shard=shards, pp=pp, schedule=schedule)
    micro_batch = data.draw(st.integers(1, 8))
    choice = Choice(layout, size, micro_batch, chunks=layout.num_stages // layout.pp)
    ours = any(rule(decoder(), cluster(), choice) for rule in (batch, pipeline_batch, micro_steps))
    try:
        cut = cut_step(TrainConfig(global_batch=size, micro_batch=micro_batch), layout)
    except LayoutError:
        assert ours
    else:
        assert not ours
        assert cut.num_micro_steps() == choice.micro_steps


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_micro_steps_as_training_takes(more: int) -> None:
    size = 8 * MOST_MICRO_STEPS + more
    refused = micro_steps(decoder(), cluster(), choose(size, 1, dp_replicate=8))
    assert (refused is not None) == bool(more)
    if more:
        with pytest.raises(ConfigError, match="100,001 micro-steps"):
            Cut(size, 8, 1)


def test_those_that_another_micro_batch_mends_are_rules() -> None:
    assert set(OF_MICRO_BATCH) <= {rule.__name__ for rule in RULES}


def test_a_layout_is_named_by_what_the_rule_is_about() -> None:
    layout = Layout(dp_replicate=2, dp_shard=4, tp=2, pp=2)
    assert (name_data(layout), name_stages(layout), name_data(Layout(tp=2))) == (
        "dp_replicate=2,dp_shard=4",
        "pp=2",
        "single",
    )
    assert name_stages(Layout(pp=4, schedule="zbv")) == "pp=4,schedule=zbv"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from(SCHEDULES), st.data()
)
def test_what_a_refusal_names_instead_is_let_in_and_the_nearest(
    size: int, replicas: int, shards: int, pp: int, schedule: str, data: st.DataObject
) -> None:
    layout = Layout(dp_replicate=replicas, dp_shard=shards, pp=pp, schedule=schedule)
    micro_batch = data.draw(st.integers(1, 8))

    def refusal(size: int, micro_batch: int) -> Refusal | None:
        choice = Choice(layout, size, micro_batch, chunks=layout.num_stages // layout.pp)
        return next(filter(None, (rule(decoder(), cluster(), choice) for rule in (batch, pipeline_batch))), None)

    refused = refusal(size, micro_batch)
    if refused is None:
        return
    names = re.fullmatch(r".* can be ([\d, or]+?)( or more)?( \(.* micro-steps\))?", refused.because)
    assert names is not None, refused.because
    values = [int(one) for one in re.findall(r"\d+", names[1])]
    if "micro_batch can be" in refused.because:
        assert not any(refusal(size, value) for value in values)
        off = min(abs(value - micro_batch) for value in values)
        assert all(refusal(size, other) for other in range(max(1, micro_batch - off + 1), micro_batch + off))
        return
    assert not any(refusal(value, micro_batch) for value in values)
    below, above = (max((n for n in values if n < size), default=1), min((n for n in values if n > size), default=size))
    assert all(refusal(other, micro_batch) for other in range(below + 1 if below in values else 1, size))
    assert above in values and all(refusal(other, micro_batch) for other in range(size, above))


@pytest.mark.parametrize(
    ("size", "micro_batch", "degrees", "told"),
    [
        (10, 3, {"pp": 8}, "pp=8 wants one shape; micro_batch can be 1 (10 micro-steps)"),
        (10, 3, {"pp": 2}, "micro_batch can be 2, 5, 1 (5, 2, 10 micro-steps)"),
        (7, 1, {"pp": 2, "dp_replicate": 4}, "over dp=4 leaves 3; global_batch can be 8"),
        (26, 1, {"pp": 2, "dp_replicate": 4}, "over dp=4 leaves 2; global_batch can be 24 or 28"),
        (6, 1, {"pp": 8}, "a rank has 6: global_batch can be 8"),
        (12, 2, {"pp": 2, "dp_shard": 4, "schedule": "interleaved"}, "one shape; global_batch can be 32"),
        (3, 1, {"dp_shard": 8}, "8 ranks without a sample; global_batch can be 8 or more"),
        (3, 2, {"dp_shard": 4, "pp": 2}, "4 ranks without a sample; global_batch can be 16 or more"),
        (900_000, 1, {"dp_replicate": 8}, "can have 100,000; micro_batch can be 2 or more"),
        (900_000, 1, {"dp_replicate": 4, "pp": 2}, "micro_batch can be 3, 4, 5 (75,000, 56,250, 45,000 micro-steps)"),
    ],
)
def test_the_nearest_that_can_be_split_is_named(
    size: int, micro_batch: int, degrees: dict[str, Any], told: str
) -> None:
    layout = Layout(**degrees)
    choice = Choice(layout, size, micro_batch, chunks=layout.num_stages // layout.pp)
    refused = next(filter(None, (rule(decoder(), cluster(), choice) for rule in (batch, pipeline_batch, micro_steps))))
    assert refused.because.endswith(told)
