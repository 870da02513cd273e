"""What the first stage sends stands for what every stage is sent; another shape is said, not guessed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.errors import LayoutError
from allranks.parallel.stage_transport import Sent
from allranks.rehearsing.crossings import Crossings, check_entry
from allranks.rehearsing.refusals import Unrehearsable
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
