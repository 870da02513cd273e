"""A pipeline that takes fewer micro-steps than stages, and what its schedule keeps before its first step."""

from dataclasses import replace

import pytest

from allranks.layout import Layout
from allranks.parallel.stage_schedule import Scheduler
from allranks.rehearsed_messages import Message
from allranks.rehearsing import dryrun
from allranks.rehearsing.ledger import Stretch
from allranks.rehearsing.rank_step import RankStep
from allranks.rehearsing.shallow import check_shallow, shallow
from allranks.rehearsing.shortening import NotShortened
from tests.rehearsing.tasks import Tokens, rehearsed

GATHER = Message("dp_shard", "all-gather", 8, 2, "task.py:1 forward")
OF_ALL = replace(GATHER, axis="all", op="barrier", across=(0, 1, 2, 3))


def test_schedules_are_torchs_again_afterwards() -> None:
    before = vars(Layout)["fits_schedule"], vars(Scheduler)["_make"]
    with shallow(6):
        assert Layout(pp=8).fits_schedule(6) and not Layout(pp=8).fits_schedule(5)
    assert not Layout(pp=8).fits_schedule(7)
    assert (vars(Layout)["fits_schedule"], vars(Scheduler)["_make"]) == before


def test_stages_that_meet_within_a_micro_step_are_not_shallow() -> None:
    check_shallow([Stretch("forward", messages=[GATHER]), Stretch("update", messages=[OF_ALL])])
    for phase in ("forward", "backward"):
        with pytest.raises(NotShortened):
            check_shallow([Stretch(phase, messages=[GATHER, OF_ALL])])


def test_who_meets_others_is_traced_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    def refuse(stretches: list[Stretch]) -> None:
        refused.append(len(stretches))
        raise NotShortened("they meet")

    monkeypatch.setattr(dryrun, "check_shallow", refuse)
    told = rehearsed(Tokens(layers=4), "pp=4", 4, "train.global_batch=7", "train.micro_batch=1")
    assert len(refused) == 1
    assert len([one for one in told.sequence if one.op == "send"]) == 7


@pytest.mark.parametrize(
    ("layout", "world", "rank"),
    [
        ("pp=4", 4, 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("pp=2,dp_shard=2,schedule=interleaved", 4, 3), ("pp=2,schedule=gpipe", 2, 1), ("ddp", 2, 1),
                ("fsdp,recompute=full", 2, 0), ("tp=2", 2, 0), ("fsdp,sharding=grad_op", 2, 0),
            )
        ),
    ],
)  # fmt: skip
def test_one_micro_step_leaves_what_many_leave(
    layout: str, world: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step, of which only the state is of use, has one; its schedule's memory is there all the same."""
    words = f"train.global_batch={12 * (1 if 'pp' in layout and 'dp' not in layout else 2)}", "train.micro_batch=1"
    quick = rehearsed(Tokens(layers=4), layout, world, *words, rank=rank)
    monkeypatch.setattr(RankStep, "warm_up", RankStep.run)
    assert rehearsed(Tokens(layers=4), layout, world, *words, rank=rank) == quick
