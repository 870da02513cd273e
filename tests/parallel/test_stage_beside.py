"""What has no gradient goes past torch's stage, as torch 2.11 needs it; here as with the torch that is installed."""

from typing import Any

import pytest
import torch

from allranks.parallel import stage_schedule
from allranks.parallel.stage_beside import Beside
from allranks.parallel.stage_schedule import CLASSES
from allranks.parallel.stage_transport import Sent
from tests.distributed.matrix_models import Crossed, Sentence, Streams
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, parts_of, session_of, step_through, together

LEARNS = Sent(0, (2,), torch.float64, requires_grad=True)
MASK = Sent(1, (2,), torch.bool, requires_grad=False)
ALSO = Sent(2, (2, 1), torch.float64, requires_grad=True)


def test_both_kinds_part_and_join_in_their_order() -> None:
    beside = Beside((LEARNS, MASK, ALSO), (MASK, LEARNS), torch.device("cpu"))
    (into,) = beside.room(3)
    assert (into.shape, into.dtype, into.requires_grad) == ((2,), torch.bool, False)
    assert beside.room(3)[0] is into, "as torch's, what is received into stays"
    first, last = torch.ones(2), torch.ones(2, 1)
    joined = beside.join(3, (first, last))
    assert [id(one) for one in joined] == [id(first), id(into), id(last)]
    mask = torch.ones(2, dtype=torch.bool)
    assert [id(one) for one in beside.part(3, (mask, first))] == [id(first)]
    assert [id(one) for one in beside.leaves[3]] == [id(mask)]


def test_a_first_stage_receives_nothing() -> None:
    beside = Beside((), (LEARNS,), torch.device("cpu"))
    assert beside.join(0, ()) == () and beside.room(0) == []


class Apart(Crossed):
    """Takes the left stream for what it does not learn from, if it is `behind`."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.behind = behind

    def forward(self, left: torch.Tensor, **named: torch.Tensor) -> Any:
        return super().forward(left.detach() if self.behind else left, **named)


class Unreached(Sentence):
    """A stage receives what has a gradient elsewhere, and none here."""

    def model(self) -> Any:
        model = Streams()
        number = len(model.blocks)
        model.blocks = torch.nn.ModuleList(Apart(2 * index >= number) for index in range(number))
        return model


def train(task: Sentence, schedule: str, past: bool) -> Any:
    """In a worker: the losses, what the ranks have at the end, and the messages' rooms that no gradient comes to."""
    overrides = ("train.global_batch=8", "train.micro_steps=4", "optimizer.name=adamw", "optimizer.lr=0.01")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_schedule, "KNOWS_GRADIENTS", not past)
        session = session_of(task, config_of(f"pp=2,schedule={schedule}", *overrides))
        losses = [stepped.loss for stepped in step_through(session, 3)]
    assert session.spread.stages is not None
    scheduler = session.spread.stages.scheduler
    besides = [view.beside for made in scheduler._made.values() for view in made.views]
    assert all((beside is not None) == past for beside in besides) and besides
    left = sum(len(beside.leaves) for beside in besides if beside is not None)
    masks = sum(into.dtype == torch.bool for into in scheduler.received_into)
    return losses, parts_of(session), left, masks


@pytest.mark.sample(3)
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", sorted(CLASSES))
@pytest.mark.parametrize("task", [Sentence(kind="streams"), Unreached(kind="streams")], ids=["reached", "unreached"])
def test_a_pipeline_computes_the_same_where_masks_go_past_torchs_stage(
    pool: Pools, task: Sentence, schedule: str
) -> None:
    ways = (True, False) if stage_schedule.KNOWS_GRADIENTS else (True,)
    found = {past: pool(2).run(train, task, schedule, past) for past in ways}
    for told in found.values():
        assert [losses for losses, *_ in told] == [told[0][0]] * 2
        assert sum(left for *_, left, _ in told) == 0, "nothing is kept between steps"
        assert sum(masks for *_, masks in told) == 4 * (3 if CLASSES[schedule] not in ("1F1B", "GPipe") else 1)
    if not stage_schedule.KNOWS_GRADIENTS:
        return
    assert found[True][0][0] == found[False][0][0]
    past, through = (together([parts for _, parts, *_ in found[way]]) for way in (True, False))
    assert past.keys() == through.keys()
    for name, tensor in past.items():
        assert torch.equal(tensor, through[name]), name
