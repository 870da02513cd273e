"""What is proposed in place of a layout that is too large for one machine: it runs here, and exercises every axis."""

from itertools import combinations

import pytest

from allranks.errors import LayoutError
from allranks.layout import PROCESS_AXES, Layout
from allranks.request import TrainRequest
from allranks.verifying.local_layouts import MOST_PROCESSES, proposals, refuse_exceptions
from allranks.verifying.task_verify import plan_run
from tests.commands import POINTS


def accepted(words: str) -> Layout:
    """What verify makes of a proposal; it refuses one that is too large, or whose modes do not go together."""
    layout, *keys = words.split()
    plan = plan_run(TrainRequest(task_spec=POINTS, layout=layout, overrides=(*keys,)), 4)
    assert plan.nproc <= MOST_PROCESSES
    return plan.layout


@pytest.mark.parametrize(
    ("layout", "nproc", "words", "small"),
    [
        ("dp_shard=4,pp=4,schedule=interleaved", 16, (), "dp_shard=2,pp=2,schedule=interleaved"),
        ("fsdp,sharding=grad_op,recompute=full", 16, (), "dp_shard=2,sharding=grad_op,recompute=full"),
        ("fsdp,sharding=none", 12, (), "dp_replicate=2,sharding=none"),
        ("dp_shard=*,sharding=optimizer,batchnorm=local", 16, (), "dp_shard=2,sharding=optimizer,batchnorm=local"),
        ("cp=16,compile=block", 16, ("layout.context=ring",), "cp=2,compile=block layout.context=ring"),
        ("fsdp,offload=all", 9, ("layout.gather=bfloat16",), "dp_shard=2,offload=all layout.gather=bfloat16"),
        ("dp_shard=16,ep=8", 16, ("layout.static_graph=true",), "dp_shard=2,ep=2 layout.static_graph=true"),
    ],
)
def test_the_nearest_layout_keeps_the_modes(layout: str, nproc: int, words: tuple[str, ...], small: str) -> None:
    with pytest.raises(LayoutError) as refused:
        plan_run(TrainRequest(task_spec=POINTS, layout=layout, nproc=nproc, overrides=words), 4)
    assert str(refused.value).endswith(f"exercises every axis: --layout {small}")
    assert proposals(accepted(small)) == [small]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=4, dp_shard=4, tp=4, pp=4),
        Layout(dp_replicate=2, dp_shard=2, tp=2, pp=2),
        Layout(dp_replicate=2, dp_shard=2, tp=2, cp=2, pp=2, ep=2, schedule="interleaved", context="ring"),
        Layout(dp_replicate=8, dp_shard=2, tp=2, cp=2, offload="all", sharding="grad_op", batchnorm="local"),
    ],
)
def test_axes_that_do_not_fit_together_are_exercised_by_twos(layout: Layout) -> None:
    small = [accepted(words) for words in proposals(layout)]
    axes = [axis for axis in PROCESS_AXES if getattr(layout, axis) > 1]
    together = {pair for one in small for pair in combinations([a for a in axes if getattr(one, a) > 1], 2)}
    assert together == set(combinations(axes, 2))
    assert max(one.ep for one in small) == min(2, layout.ep)
    for one in small:
        assert one.schedule == (layout.schedule if one.pp > 1 else "1f1b")
        assert one.context == (layout.context if one.cp > 1 else "ulysses")


def test_they_are_told_one_after_the_other() -> None:
    with pytest.raises(LayoutError) as refused:
        plan_run(TrainRequest(task_spec=POINTS, layout="dp_replicate=4,dp_shard=4,pp=4,tp=4"), 4)
    assert str(refused.value).endswith(
        "takes 256 processes, more than the 8 that run on one machine, and so do all of its axes at 2; these exercise "
        "every two of them together, one after the other: --layout dp_replicate=2,dp_shard=2,tp=2, "
        "--layout dp_replicate=2,dp_shard=2,pp=2 and --layout tp=2,pp=2"
    )


def test_what_computes_something_else_by_design_is_refused_by_its_words() -> None:
    refuse_exceptions(Layout(dp_replicate=2))
    with pytest.raises(LayoutError, match=r"^layout.ddp_hook=powersgd and layout.local_sgd=2: computes something else"):
        refuse_exceptions(Layout(dp_replicate=2, ddp_hook="powersgd", local_sgd=2))
