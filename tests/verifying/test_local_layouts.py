"""What is proposed in place of a layout that is too large for one machine: it runs here, and exercises every axis."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import PROCESS_AXES, Layout
from allranks.parallel.block_modes import change_blocks
from allranks.parallel.host_parameters import choose_offload
from allranks.request import TrainRequest
from allranks.verifying.local_layouts import MOST_PROCESSES, proposals, refuse_exceptions
from allranks.verifying.plan import plan_run
from tests.commands import POINTS


def accepted(words: str) -> Layout:
    """What verify makes of a proposal; it refuses one that is too large, or whose modes do not go together."""
    layout, *keys = words.split()
    plan = plan_run(TrainRequest(task_spec=POINTS, layout=layout, overrides=(*keys,)), 4)
    assert plan.nproc <= MOST_PROCESSES
    cpu, blocks = torch.device("cpu"), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    choose_offload(plan.layout, cpu)
    change_blocks({"": blocks}, {"": ["0", "1"]}, replace(plan.layout, compile="none"), cpu)
    return plan.layout


@pytest.mark.parametrize(
    ("layout", "nproc", "words", "small"),
    [
        ("dp_shard=4,pp=4,schedule=interleaved", 16, (), "dp_shard=2,pp=2,schedule=interleaved"),
        ("fsdp,sharding=grad_op,recompute=full", 16, (), "dp_shard=2,sharding=grad_op,recompute=full"),
        ("fsdp,sharding=none", 12, (), "dp_replicate=2,sharding=none"),
        ("dp_shard=*,sharding=optimizer,batchnorm=local", 16, (), "dp_shard=2,sharding=optimizer,batchnorm=local"),
        ("cp=16,compile=block", 16, ("layout.context=ring",), "cp=2,compile=block layout.context=ring"),
        ("fsdp,offload=all", 9, ("layout.gather=bfloat16",), "dp_shard=2 layout.gather=bfloat16"),
        ("ddp,offload=activations,recompute=full", 9, (), "dp_replicate=2,recompute=full"),
        ("dp_shard=16,ep=8", 16, ("layout.static_graph=true",), "dp_shard=2,ep=2 layout.static_graph=true"),
    ],
)
def test_the_nearest_layout_keeps_the_modes(layout: str, nproc: int, words: tuple[str, ...], small: str) -> None:
    with pytest.raises(LayoutError) as refused:
        plan_run(TrainRequest(task_spec=POINTS, layout=layout, nproc=nproc, overrides=words), 4)
    without = f", without {layout.split(',')[1]}, since all memory is the host's" if "offload" in layout else ""
    told = str(refused.value)
    assert f"exercises every axis{without}" in told and told.endswith(f": --layout {small}")
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
        assert one.offload == "none"


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


@pytest.mark.parametrize(
    ("layout", "nproc", "words", "because", "small"),
    [
        ("data_parallel", None, (), "data_parallel is one process on several GPUs", "dp_replicate=2"),
        ("data_parallel,recompute=full", None, (), "nothing of it would run", "dp_replicate=2,recompute=full"),
        ("placement", None, (), "it cannot be verified; its copies can, with", "placement,dp_replicate=2"),
        ("hsdp", 2, (), "dp_replicate=nodes would be 1, and nothing of it compared", "dp_replicate=2,dp_shard=2"),
        ("hsdp", 4, (), "on 4 processes is dp_shard=4", "dp_replicate=2,dp_shard=2"),
        ("hsdp,tp=2", 2, (), "dp_replicate=nodes and dp_shard=* would be 1", "dp_replicate=2,dp_shard=2,tp=2"),
        ("fsdp,tp=2", 2, (), "dp_shard=* would be 1", "dp_shard=2,tp=2"),
        ("fsdp,tp=2,sharding=none", 2, (), "dp_shard=* would be 1", "dp_shard=2,tp=2,sharding=none"),
        ("fsdp,offload=all", 2, (), "offload=all has no place here", "dp_shard=2"),
        ("ddp,offload=activations", 3, ("layout.static_graph=true",), "it says where values wait",
         "dp_replicate=3 layout.static_graph=true"),
        ("hsdp,offload=all", 2, (), "without offload=all", "dp_replicate=2,dp_shard=2"),
    ],
)  # fmt: skip
def test_what_would_be_equal_without_having_been_exercised(
    layout: str, nproc: int | None, words: tuple[str, ...], because: str, small: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        plan_run(TrainRequest(task_spec=POINTS, layout=layout, nproc=nproc, overrides=words), 4)
    told = str(refused.value)
    assert because in told and told.endswith(f"--layout {small}")
    accepted(small)


def test_rules_that_name_gpus_are_to_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[layout.placement]\n"*" = "cuda:1"\n')
    with pytest.raises(LayoutError, match=r"without the rules of \[layout.placement\] that name GPUs, with --layout"):
        plan_run(TrainRequest(task_spec=POINTS, toml=tmp_path / "run.toml"), 4)


@pytest.mark.parametrize(
    ("layout", "found"),
    [("fsdp,tp=2", "dp_shard=2,tp=2"), ("ddp", "dp_replicate=2"), ("tp=3", "tp=3"), ("fsdp,pp=2", "dp_shard=2,pp=2")],
)
def test_what_takes_all_that_is_left_takes_two(layout: str, found: str) -> None:
    assert str(plan_run(TrainRequest(task_spec=POINTS, layout=layout), 4).layout) == found
