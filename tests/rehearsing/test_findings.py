"""What would have failed on the cluster is found, and each message names the move that mends it."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import ConfigError, LayoutError, TaskError
from allranks.planning.hardware import find_cluster
from allranks.rehearsing.findings import compare_ranks
from allranks.rehearsing.refusals import Unrehearsable
from allranks.rehearsing.whole import Question, rehearse
from allranks.rehearsing.world_of_ranks import choose_ranks
from allranks.task import Hints, TensorStyle
from tests.rehearsing.parting import (
    apart,
    by_barrier,
    by_environment,
    by_root,
    by_rows,
    by_size,
    by_type,
    calling,
    in_pairs,
)
from tests.rehearsing.tasks import Calling, Layered, Tokens, branch, configured, lopsided, mixed, rehearsed, unequal


class Branching(Layered):
    """Its forward branches on a value."""

    def middle(self) -> nn.Module:
        return Calling(branch)


class Mixed(Layered):
    """Two types meet in a product."""

    def middle(self) -> nn.Module:
        return Calling(mixed)


class ShortLabels(Layered):
    """Its labels are integers of 32 bits."""

    def dataset(self, split: str) -> Any:
        short = torch.tensor(3, dtype=torch.int32)
        return [(row, short) for row, _ in super().dataset(split)] if split == "train" else None


class Lopsided(Layered):
    """Rank 0 calls a collective that the others do not."""

    def middle(self) -> nn.Module:
        return Calling(lopsided)


class LopsidedLoss(Tokens):
    """Every other rank calls a collective in its loss, which the last stage alone computes."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if dist.get_rank() % 2:
            dist.all_reduce(output.detach().clone())
        return super().loss(output, batch)


class Unequal(Layered):
    """The first rank sums a part of what the others sum."""

    def middle(self) -> nn.Module:
        return Calling(unequal)


class Misshapen(Layered):
    """Two layers that do not fit each other."""

    def middle(self) -> nn.Module:
        return nn.Linear(self.width, self.width + 1)


class Forgetful(Tokens):
    """Its plan forgets the feed-forwards."""

    style: ClassVar[dict[str, TensorStyle]] = {}

    def hints(self) -> Hints:
        plan = {name: style for name, style in super().hints().tensor.items() if "feed_forward." not in name}
        return Hints(blocks=("layers.*",), tensor={**plan, **self.style})


class Whole(Forgetful):
    """Its plan leaves the feed-forwards whole."""

    style: ClassVar[dict[str, TensorStyle]] = {"layers.*.feed_forward": "replicate"}


class Hinting(Tokens):
    """Its hint names blocks that are not there."""

    def hints(self) -> Hints:
        return Hints(blocks=("blocks.*",))


class Idle(Layered):
    """Keeps a layer that the loss does not reach."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_module("idle", nn.Linear(4, 4))
        model.forward = lambda value: model[2](model[1](model[0](value)))  # type: ignore[index]
        return model


BROKEN = [
    (
        "a branch on a value",
        Branching,
        "ddp",
        4,
        (),
        Unrehearsable,
        r"branch on a tensor.*tasks.py:\d+.*by torch.where instead",
    ),
    (
        "two types",
        Mixed,
        "ddp",
        4,
        (),
        TaskError,
        r"of one dtype, and gets float32 and float64 \(in 1, tasks.py:\d+\); mend it there: it fails on one process",
    ),
    (
        "labels of a type that no loss takes",
        ShortLabels,
        "ddp",
        4,
        (),
        TaskError,
        r"nll_loss_forward refuses float32 and int32: expected target dtype to be Long or Byte, but got Int; it takes "
        r"float32 and int64 \(in loss, tasks.py:\d+\); mend it there: it fails on one process",
    ),
    ("shapes", Misshapen, "ddp", 4, (), TaskError, r"would fail: .*33\].*\(in 2\); mend it there: it fails on one"),
    (
        "a hint for nothing",
        Hinting,
        "fsdp",
        4,
        (),
        LayoutError,
        r"hints\(\).blocks: 'blocks.\*' matches no module.*the nearest are layers.2, layers.1, layers.0",
    ),
    (
        "more stages than blocks",
        Tokens,
        "pp=4",
        4,
        (),
        LayoutError,
        r"begins at 4 blocks at least, .* use fewer stages",
    ),
    ("a world of another size", Tokens, "tp=3,dp_shard=2", 8, (), LayoutError, r"= 6, but the world has 8 .*tp=4 fits"),
    ("heads that do not divide", Tokens, "tp=8", 8, (), LayoutError, r"num_heads=4, .*tp can be 1, 2, 4"),
    (
        "layers without a rule",
        Forgetful,
        "tp=2",
        2,
        (),
        LayoutError,
        r"feed_forward.gate has parameters and no rule.*say in hints\(\).tensor sequence .* or replicate",
    ),
    (
        "positions that do not divide",
        Tokens,
        "cp=3",
        3,
        (),
        LayoutError,
        r"32 positions of entry 'tokens': 30 or 33 do",
    ),
    ("fewer samples than ranks", Tokens, "ddp", 16, (), LayoutError, r"set train.global_batch=16 or more"),
    (
        "experts where there are none",
        Tokens,
        "dp_replicate=4,ep=2",
        4,
        (),
        LayoutError,
        r"model\(\) has none.*leave ep out",
    ),
]


@pytest.mark.parametrize(
    ("kind", "layout", "world", "words", "error", "message"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN]
)
def test_a_broken_layout_or_task_is_caught(
    kind: type[Any], layout: str, world: int, words: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rehearsed(kind(), layout, world, *words)


def test_a_rank_that_takes_another_way_is_found() -> None:
    first, last = (rehearsed(Lopsided(), "fsdp", 4, rank=rank) for rank in (0, 3))
    (found,) = compare_ranks({0: first, 3: last})
    assert found.fails and found.kind == "hang"
    assert re.search(r"ranks 0 and 3 part at collective \d+ of the step: rank 0 executes all-reduce", found.what)
    assert re.search(r"over dp_shard \(.* asked for by tasks.py:\d+ lopsided\), rank 3 .*would hang", found.what)
    assert "nothing in them may depend on the rank" in found.next
    same = rehearsed(Layered(), "fsdp", 4), rehearsed(Layered(), "fsdp", 4, rank=3)
    assert compare_ranks(dict(enumerate(same))) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("way", "message"),
    [
        (by_environment, r"rank 0 executes all-reduce over dp_replicate \(float32.* by_environment\), rank 3"),
        (by_barrier, r"rank 0 executes barrier over dp_replicate \(asked for by .* by_barrier\), rank 3"),
        (by_size, r"rank 0 executes all-gather .* by_size\), rank 3 all-gather .* by_size\)"),
        (by_type, r"rank 0 executes all-reduce .*\(int32, .* rank 3 all-reduce .*\(float32, "),
        (by_root, r"broadcast .*\(float32 from member 0 of its group, .* rank 3 .*from member 3 of its group"),
        (by_rows, r"rank 0 executes all-gather .* by_rows\), rank 3 all-gather .* by_rows\)"),
    ],
)
def test_what_ranks_have_to_say_alike_is_compared(way: Callable[..., Any], message: str) -> None:
    words = "train.global_batch=10"  # 3, 3, 2 and 2 samples
    first, last = (rehearsed(calling(way), "ddp", 4, words, rank=rank) for rank in (0, 3))
    (found,) = compare_ranks({0: first, 3: last})
    assert found.fails and re.search(message, found.what)


def test_a_group_of_the_users_own_is_compared_among_its_members() -> None:
    two = {rank: rehearsed(calling(in_pairs), "dp_shard=2,dp_replicate=2", 4, rank=rank) for rank in (0, 3)}
    assert compare_ranks(two) == []
    three = {rank: rehearsed(calling(apart), "ddp", 4, rank=rank) for rank in (0, 2, 3)}
    assert compare_ranks({rank: three[rank] for rank in (0, 3)}) == []
    (found,) = compare_ranks(three)
    assert re.search(
        r"2 and 3 part at collective 1 of the group \[2, 3\] .*rank 2 executes none, rank 3 all-r", found.what
    )


def test_an_all_reduce_of_ranks_that_bring_unequal_sizes_is_found() -> None:
    first, last = (rehearsed(Unequal(), "ddp", 4, rank=rank) for rank in (0, 3))
    (found,) = compare_ranks({0: first, 3: last})
    assert re.search(r"all-reduce over dp_replicate \(.* unequal\), rank 3 all-reduce over dp_replicate", found.what)


@pytest.mark.full
def test_a_loss_of_the_last_stage_is_compared_too() -> None:
    task, cluster = LopsidedLoss(layers=4), find_cluster("1x4:cpu")
    config, layout = configured(task, "pp=2,dp_shard=2", 4, "train.micro_batch=2")
    ranks = choose_ranks("kinds", layout)
    (found,) = rehearse(Question("lopsided", task, config, cluster, layout, ranks)).findings
    assert found.kind == "hang" and found.what.startswith("ranks 2 and 3 part at collective")
    assert re.search(r"rank 3 all-reduce over \w+ \(.*test_findings.py:\d+ loss\)", found.what)


def test_a_parameter_that_stays_whole_is_found() -> None:
    found = [one for one in rehearsed(Whole(hidden=256), "tp=2", 2).findings if one.kind == "unsharded"]
    assert len(found) == 3 * 3
    assert found[0].what == "layers.0.feed_forward.gate.weight ([1024, 256]) lies whole on each of tp=2 ranks"
    assert "hints().tensor" in found[0].next
    assert rehearsed(Tokens(hidden=256), "tp=2", 2).findings == ()


def test_parameters_that_the_loss_does_not_reach_are_found() -> None:
    (found,) = rehearsed(Idle(), "ddp", 2).findings
    assert found.what == "idle.weight and 1 more get no gradient"


def test_ranks_that_are_asked_for() -> None:
    _, layout = configured(Tokens(layers=8), "pp=4,dp_shard=2", 8, "train.global_batch=16")
    assert choose_ranks("kinds", layout) == (0, 1, 4, 5, 6, 7)
    assert choose_ranks("7, 0", layout) == (7, 0)
    assert choose_ranks("all", layout) == tuple(range(8))
    for wrong, message in (("8", "8 processes, whose ranks are 0 to 7"), ("one", "'one' is no rank")):
        with pytest.raises(ConfigError, match=message):
            choose_ranks(wrong, layout)
