"""Each stage begins with what a rank of the same pipeline sends it, or with what a walk through all stages hands on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.stage_transport import Sent
from allranks.rehearsing.crossings import Crossings, hear
from allranks.task import Hints
from tests.rehearsing.tasks import Tokens, rehearsed

SENT = (Sent(0, (2, 8), torch.float32, True),)
OTHER = (*SENT, Sent(1, (2, 4), torch.bool, False))
SIGNATURE = (True, ((2, 8), torch.int64))


def to(stage: int, *sent: Sent) -> Any:
    return {(stage, SIGNATURE): sent}


def test_a_stage_hears_what_was_sent_to_it() -> None:
    transport: Any = SimpleNamespace(hear_own=lambda stage, signature: None)
    entries = to(1, *SENT) | to(2, *OTHER)
    assert hear(entries, transport, 1, SIGNATURE) == SENT and hear(entries, transport, 2, SIGNATURE) == OTHER
    with pytest.raises(LayoutError, match="sends stage 3"):
        hear(entries, transport, 3, SIGNATURE)
    transport.hear_own = lambda stage, signature: SENT
    assert hear({}, transport, 3, SIGNATURE) == SENT, "two stages of one rank hand over"


def test_what_a_rank_lacks_is_what_another_one_sends() -> None:
    crossings = Crossings(Layout(pp=4, tp=2))
    assert [rank for rank in range(8) if crossings.lacks(rank)] == [2, 3, 4, 5, 6, 7]
    crossings.learn(0, to(1, *SENT))
    assert [rank for rank in range(8) if crossings.lacks(rank)] == [3, 4, 5, 6, 7], "of rank 0's pipeline alone"
    crossings.learn(5, to(1, *SENT) | to(2, *SENT) | to(3, *OTHER), walked=True)
    assert [rank for rank in range(8) if crossings.lacks(rank)] == [4, 6]
    assert crossings.of(7) == to(1, *SENT) | to(2, *SENT) | to(3, *OTHER) and crossings.findings == []
    assert crossings.bytes_to_stages() == {1: (64, 64), 2: (64, 64), 3: (72, 64)}


def test_a_stage_that_follows_one_of_its_own_rank_lacks_nothing() -> None:
    """There and back: stages 0 and 3 are of rank 0, stages 1 and 2 of rank 1."""
    crossings = Crossings(Layout(pp=2, schedule="zbv"))
    assert crossings.lacks(0) and crossings.lacks(1)
    crossings.learn(0, to(1, *SENT))
    assert crossings.lacks(0) and not crossings.lacks(1)
    assert Crossings(Layout(pp=2, schedule="interleaved")).lacks(0) and not Crossings(Layout(pp=2)).lacks(0)


@pytest.mark.parametrize("walked_first", [True, False])
def test_what_a_rank_sends_counts_more_than_a_walk_and_is_compared_with_it(walked_first: bool) -> None:
    crossings = Crossings(Layout(pp=4))
    for walked in (walked_first, not walked_first):
        crossings.learn(0, to(1, *(OTHER if walked else SENT)), walked=walked)
    assert crossings.of(0) == to(1, *SENT)
    (found,) = crossings.findings
    assert found.kind == "stages" and not found.fails and found.next.startswith("--ranks all")
    assert "stage 1 of the pipeline begins with" in found.what
    assert "float32 [2, 8] and bool [2, 4] on" in found.what and "float32 [2, 8] on" in found.what


@pytest.mark.full
def test_a_stage_that_follows_one_of_the_same_rank_is_handed_what_that_sends() -> None:
    """There and back: the last rank's second stage begins where its first one ends, header first."""
    for schedule in ("zbv", "dualpipev"):
        told = rehearsed(Tokens(layers=4), f"pp=2,schedule={schedule}", 2, rank=1)
        found = {one.op: one.count for one in told.collectives if one.axis == "pp"}
        assert found["send"] == found["receive"] == 2 * told.micro_steps


class Reading(nn.Module):
    """Blocks that get what a frozen layer makes of the tokens, and a mask of its values."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.frozen = nn.Embedding(vocab, hidden).requires_grad_(False)
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Reader(hidden) for _ in range(4))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value, memory = self.embedding(tokens), self.frozen(tokens)
        near = memory[..., :1] > 0
        for block in self.blocks:
            value = block(value, memory, near)
        found: torch.Tensor = self.head(value)
        return found


class Reader(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, value: torch.Tensor, memory: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.linear(value + memory)) * near


class ReadingTask(Tokens):
    def model(self) -> nn.Module:
        return Reading(self.vocab, self.hidden)

    def hints(self) -> Hints:
        return Hints(blocks=("blocks.*",))


@pytest.mark.full
def test_what_frozen_layers_and_masks_send_is_rehearsed() -> None:
    """Of each micro-step: two streams in float32 and a byte a token go on, the gradient of one comes back."""
    task = ReadingTask()
    for rank, (onward, back) in enumerate([("send", "receive"), ("receive", "send")]):
        told = rehearsed(task, "pp=2", 2, rank=rank)
        found: dict[str, int] = {}
        for one in told.collectives:
            found[one.op] = found.get(one.op, 0) + one.bytes * (one.axis == "pp")
        tokens = 8 * task.seq
        assert (found[onward], found[back]) == (tokens * (2 * 4 * task.hidden + 1), tokens * 4 * task.hidden), rank
