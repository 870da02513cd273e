"""A step is refused where the data's own cut refuses it, before anybody starts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.config_sections import TrainConfig
from allranks.data.cut import Cut, cut_step
from allranks.errors import ConfigError, LayoutError
from allranks.even_cut import MOST_MICRO_STEPS
from allranks.layout import Layout
from allranks.plan import Choice
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
