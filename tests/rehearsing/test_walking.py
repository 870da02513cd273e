"""A walk of one rank through all stages says with what each begins: any number of tensors, shapes and types."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from allranks.layout import Layout
from allranks.parallel import stages
from allranks.planning.hardware import find_cluster
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing import dryrun
from allranks.rehearsing.comparing import compare_ranks
from allranks.rehearsing.crossings import Crossings
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.rehearsing.walking import walking
from allranks.rehearsing.whole import Question, rehearse
from allranks.task import Hints, Task
from tests.rehearsing.tasks import Tokens, configured, rehearsed
from tests.rehearsing.unlike import Hourglass, Pyramid, Translation

FOUR = 4
"""Bytes of a number."""
SMALL: list[tuple[Task, dict[int, list[tuple[int, ...]]]]] = [
    (Pyramid(channels=2, side=16), {1: [(1, 4, 8, 8)], 2: [(1, 8, 4, 4)], 3: [(1, 16, 2, 2)]}),
    (Translation(hidden=8), {1: [(1, 96, 8)], 2: [(1, 32, 8), (1, 96, 8)], 3: [(1, 32, 8), (1, 96, 8)]}),
    (
        Hourglass(width=4, length=8),
        {1: [(1, 4, 8), (1, 8, 4)], 2: [(1, 2, 16), (1, 8, 4), (1, 4, 8)], 3: [(1, 4, 8), (1, 8, 4)]},
    ),
]
"""Task -> with what each of four stages begins, of one sample."""
ACCUMULATED = "train.micro_batch=1"


def told_of(task: Task, layout: str, world: int, *words: str) -> tuple[dict[int, RankRehearsal], Crossings]:
    """Every rank by itself, so that each but the first stage's needs a walk; and what the last walk has found."""
    config, found = configured(task, layout, world, *words)
    told = {rank: rehearse_rank(task, config, World(found, world, on_cuda=False), rank) for rank in range(world)}
    crossings = Crossings(found)
    rehearse_rank(task, config, World(found, world, on_cuda=False), world - 1, crossings=crossings)
    return told, crossings


def test_torchs_stages_are_themselves_again_afterwards() -> None:
    made, of = (stages.Pipeline, stages.Transport), Layout.stage_rank  # type: ignore[attr-defined]
    with walking():
        assert stages.Pipeline is not made[0] and Layout.stage_rank is of  # type: ignore[attr-defined]
    assert (stages.Pipeline, stages.Transport) == made  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "begins"),
    [pytest.param(*case, marks=() if place == 1 else pytest.mark.full) for place, case in enumerate(SMALL)],
)
def test_stages_that_begin_unlike_one_another(task: Task, begins: dict[int, list[tuple[int, ...]]]) -> None:
    """And what one sends the next one receives, in as many messages of as many bytes."""
    told, crossings = told_of(task, "pp=4", 4, ACCUMULATED)
    found = {stage: [one.shape for one in sent] for (stage, _), sent in crossings.of(3).items()}
    assert found == begins
    assert compare_ranks(told) == [] and crossings.findings == []
    sizes: Counter[tuple[int, int]] = Counter()
    for rank, one in told.items():
        for message in one.sequence:
            if message.op == "send" and message.peer is not None:
                sizes[rank, message.peer] += message.num_bytes
    for stage, shapes in begins.items():
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        assert sizes[stage - 1, stage] == sizes[stage, stage - 1] == told[0].traced_micro_steps * numbers * FOUR


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
@pytest.mark.parametrize("task", [task for task, _ in SMALL])
def test_ranks_of_two_stages_send_each_other_what_they_receive(task: Task, schedule: str) -> None:
    told, _ = told_of(task, f"pp=2,schedule={schedule}", 2, ACCUMULATED)
    assert compare_ranks(told) == []


@pytest.mark.full
def test_types_are_those_of_the_program() -> None:
    """Under autocast what a linear layer makes is of 16 bits, and what a residual adds up of 32."""
    for task, types in ((SMALL[0][0], {torch.bfloat16}), (SMALL[1][0], {torch.float32})):
        _, crossings = told_of(task, "pp=4", 4, ACCUMULATED, "train.precision=bfloat16")
        assert {one.dtype for sent in crossings.of(3).values() for one in sent} == types


@pytest.mark.full
def test_a_pipeline_is_walked_once_and_only_where_a_rank_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    walk = dryrun._walk

    def noted(asked: Any, full: bool) -> None:
        walks.append(asked.rank)
        walk(asked, full)

    monkeypatch.setattr(dryrun, "_walk", noted)
    cluster = find_cluster("1x4:cpu")
    for layout, ranks, walked in (("pp=2,dp_replicate=2", (0, 2), []), ("pp=4", (0, 2, 3), [2])):
        walks.clear()
        task = Tokens(layers=4)
        config, found = configured(task, layout, 4)
        told = rehearse(Question("tokens", task, config, cluster, found, ranks))
        assert walks == walked and told.findings == ()
        assert list(told.between_stages) == list(range(1, found.pp))


class Ranked(nn.Module):
    """Makes more on the first rank."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(value)
        return found.repeat(1, 2, 1) if torch.distributed.get_rank() == 0 else found


class RankedTask(Hourglass):
    """Its first layer looks at the rank."""

    def model(self) -> nn.Module:
        model = super().model()
        model.add_module("first", Ranked(model.get_submodule("first")))
        return model


@pytest.mark.full
def test_what_the_first_stage_really_sends_is_compared_with_the_walk() -> None:
    task = RankedTask(width=4, length=8)
    config, found = configured(task, "pp=4", 4)
    told = rehearse(Question("ranked", task, config, find_cluster("1x4:cpu"), found, (0, 2, 3)))
    assert any(one.kind == "stages" and "depends on the rank" in one.what for one in told.findings)


class Twofold(nn.Module):
    """Returns two tensors, so that no block of its kind can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(self.linear(value)), kept + value


class Deep(nn.Module):
    """Eighteen of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Twofold() for _ in range(18))
        self.last = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = kept = self.first(x)
        for block in self.blocks:
            value, kept = block(value, kept)
        found: torch.Tensor = self.last((value + kept).mean(1))
        return found


class DeepTask(Hourglass):
    def model(self) -> nn.Module:
        return Deep()

    def hints(self) -> Hints:
        return Hints(blocks=("blocks.*",))


def test_blocks_that_cannot_be_left_out_are_walked_in_full() -> None:
    told = rehearsed(DeepTask(length=8), "pp=3", 3, ACCUMULATED, rank=2)
    received = sum(one.count for one in told.collectives if one.op == "receive")
    assert told.traced == told.blocks and received == 2 * told.micro_steps
