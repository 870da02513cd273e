"""What the first stage sends stands for what every stage is sent; another shape is said, not guessed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.parallel.stage_transport import Sent
from allranks.rehearsing.crossings import Crossings, check_entry
from allranks.rehearsing.refusals import Unrehearsable
from allranks.task import Hints
from tests.rehearsing.tasks import Tokens, rehearsed

SENT = (Sent(0, (2, 8), torch.float32, True),)
SIGNATURE = (True, ((2, 8), torch.int64))


def transport(**sent: Any) -> Any:
    found = {(int(name[1:]), SIGNATURE): found for name, found in sent.items()}
    return SimpleNamespace(sent=found, hear_own=lambda stage, signature: None)


def test_later_stages_are_sent_what_the_second_one_is() -> None:
    crossings = Crossings()
    with pytest.raises(LayoutError, match="was not rehearsed"):
        crossings.hear(transport(), 2, SIGNATURE)
    crossings.learn(transport(s1=SENT))
    assert crossings.hear(transport(), 2, SIGNATURE) == SENT
    assert crossings.known and not Crossings().known


def test_a_rank_with_two_stages_knows_from_its_first() -> None:
    assert Crossings().hear(transport(s1=SENT), 3, SIGNATURE) == SENT


@pytest.mark.full
def test_a_stage_that_follows_one_of_the_same_rank_is_handed_what_that_sends() -> None:
    """There and back: the last rank's second stage begins where its first one ends, header first."""
    for schedule in ("zbv", "dualpipev"):
        told = rehearsed(Tokens(layers=4), f"pp=2,schedule={schedule}", 2, rank=1)
        found = {one.op: one.count for one in told.collectives if one.axis == "pp"}
        assert found["send"] == found["receive"] == 2 * told.micro_steps


def test_another_shape_is_said() -> None:
    pipeline: Any = SimpleNamespace(crossings={2: (0,)})
    check_entry(pipeline, 2, (torch.zeros(2, 8),), {}, (torch.zeros(2, 8),))
    with pytest.raises(Unrehearsable, match=r"stage 2 of the pipeline begins with \[2, 4\].*\[2, 8\]"):
        check_entry(pipeline, 2, (torch.zeros(2, 4),), {}, (torch.zeros(2, 8),))
    with pytest.raises(Unrehearsable, match="begins with int"):
        check_entry(pipeline, 2, (3,), {}, (torch.zeros(2, 8),))


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
