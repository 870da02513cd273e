"""No rank decides alone: one small vector, and everybody reads the same."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.stepping.agreement import Agreed, Agreement, Ballot, Saving
from tests.distributed.pool import Pools

CPU = torch.device("cpu")
LARGEST = (1 << 64) - 1


def ballot(loss: float = 0.0, **fields: Any) -> Ballot:
    """A ballot of nothing but `fields`."""
    empty = {"next_targets": 0, "next_samples": 0, "interrupt": False, "terminate": False, "ledger": 0}
    return Ballot(torch.tensor(loss, dtype=torch.float64), **(empty | fields))


def test_one_process_agrees_with_itself() -> None:
    pending = Agreement(None, CPU).start(
        ballot(1.25, next_targets=7, next_samples=3, terminate=True, ledger=0x0123456789ABCDEF, skipped=torch.ones(()))
    )
    assert pending.next_targets.item() == 7.0
    assert pending.read() == Agreed(1.25, 7, 3, False, True, 0x0123456789ABCDEF, skipped=1)
    assert pending.read() is pending.read()


def test_one_process_tells_itself_how_far_a_checkpoint_is() -> None:
    alone = Agreement(None, CPU).start(ballot(saving=Saving(6, written=True, failed=True)))
    assert (alone.saving, alone.read().written, alone.read().committed, alone.read().failed) == (6, 1, 0, 1)
    assert Agreement(None, CPU).start(ballot()).saving is None
    due = Agreement(None, CPU).start(ballot(due=True)).read()
    assert (due.due, due.written) == (1, 0)


def test_every_bit_of_the_ledger_travels() -> None:
    agreement = Agreement(None, CPU)
    for ledger in (0, 1, LARGEST, 1 << 63, 0xFFFF0000FFFF0000):
        assert agreement.start(ballot(ledger=ledger)).read().ledger == ledger


def vote(world_ledger: int) -> Any:
    """Rank r brings r + 0.5, r targets, 2r samples; rank 1 is interrupted, the last rank terminated."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    agreement = Agreement(dist.new_group(), CPU)
    pending = agreement.start(
        ballot(
            rank + 0.5,
            next_targets=rank,
            next_samples=2 * rank,
            interrupt=rank == 1,
            terminate=rank == last,
            ledger=world_ledger,
            skipped=torch.ones(()) if rank else None,
            noticed=rank > 0,
            expired=rank == 1,
            due=rank == 0,
        )
    )
    quiet = agreement.start(ballot(math.nan if rank == 1 else 1.0))
    return pending.next_targets.item(), pending.read(), quiet.read()


@pytest.mark.distributed
def test_every_rank_reads_the_same_sums(pool: Pools) -> None:
    for targets, agreed, quiet in pool(3).run(vote, LARGEST):
        assert targets == 3.0
        assert agreed == Agreed(
            4.5, 3, 6, True, True, 3 * LARGEST % (1 << 64), skipped=2, num_ranks=3, noticed=2, expired=1, due=1
        )
        assert quiet.noticed == 0 and not quiet.diverged
        assert math.isnan(quiet.loss)
        assert (quiet.interrupt, quiet.terminate, quiet.ledger) == (False, False, 0)


def vote_on_a_save() -> Any:
    """Of the checkpoint of step 6 all have written their part, the first has committed it, and the last has failed."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    agreement = Agreement(dist.new_group(), CPU)
    saving = Saving(6, written=True, committed=rank == 0, failed=rank == last)
    pending = agreement.start(ballot(saving=saving, due=rank == 0))
    return pending.saving, pending.read(), agreement.start(ballot()).saving


@pytest.mark.distributed
def test_ranks_tell_how_far_a_checkpoint_is(pool: Pools) -> None:
    for step, agreed, quiet in pool(3).run(vote_on_a_save):
        assert (step, quiet) == (6, None)
        assert agreed == Agreed(0.0, 0, 0, False, False, 0, num_ranks=3, written=3, committed=1, failed=1, due=1)


def stand(paces: list[str]) -> tuple[bool, str]:
    pace = paces[dist.get_rank()]
    pending = Agreement(dist.new_group(), CPU).start(ballot(path=("blocks.0",), pace=pace))
    return pending.read().diverged, pending.pace


@pytest.mark.distributed
def test_ranks_that_stand_elsewhere_have_parted(pool: Pools) -> None:
    assert pool(2).run(stand, ["step 3", "step 3"]) == [(False, "step 3")] * 2
    assert pool(2).run(stand, ["step 3", "step 4"]) == [(True, "step 3"), (True, "step 4")]
    assert pool(2).run(stand, ["", ""]) == [(False, "")] * 2


def test_the_vector_has_one_length_whatever_it_carries() -> None:
    pending = Agreement(None, torch.device("meta")).start(ballot(pace="step 3", noticed=True, path=("a", "b")))
    vector = pending.next_targets._base
    assert vector is not None and vector.numel() == 16, "sentinels may not make every step's message longer"
    of_stages = Agreement(None, torch.device("meta"), stage=1, num_stages=3).start(ballot(path=("a",)))
    vector = of_stages.next_targets._base
    assert vector is not None and vector.numel() == 16 + 2 * 3


def enter(paths: list[str], stages: list[int], paces: list[str]) -> bool:
    rank = dist.get_rank()
    agreement = Agreement(dist.new_group(), CPU, stage=stages[rank], num_stages=2)
    return agreement.start(ballot(path=(paths[rank],), pace=paces[rank])).read().diverged


@pytest.mark.distributed
def test_paths_are_compared_within_a_stage_and_paces_between_all(pool: Pools) -> None:
    def cases() -> list[bool]:
        stages, same = [0, 1, 0, 1], ["step 3"] * 4
        return [
            enter(["a", "b", "a", "b"], stages, same),
            enter(["a", "b", "b", "b"], stages, same),
            enter(["a", "b", "a", "a"], stages, same),
            enter(["a", "b", "a", "b"], stages, ["step 3", "step 3", "step 3", "step 4"]),
            enter(["a", "b", "a", "b"], stages, ["step 3", "step 4", "step 3", "step 4"]),
        ]

    assert pool(4).run(cases) == [[False, True, True, True, True]] * 4


def overtake() -> list[float]:
    """Two agreements on their way at once are read in the other order."""
    agreement = Agreement(dist.new_group(), CPU)
    first, second = agreement.start(ballot(1.0)), agreement.start(ballot(10.0))
    return [second.read().loss, first.read().loss]


@pytest.mark.distributed
def test_agreements_do_not_mix(pool: Pools) -> None:
    assert pool(2).run(overtake) == [[20.0, 2.0]] * 2


def test_a_rank_of_other_positions_adds_its_loss_alone() -> None:
    given = ballot(1.25, next_targets=7, next_samples=3, interrupt=True, ledger=5)
    assert Agreement(None, CPU, counts=False).start(given).read() == Agreed(0.0, 0, 0, True, False, 0)
    assert Agreement(None, CPU, counts=False, adds_loss=True).start(given).read() == Agreed(1.25, 0, 0, True, False, 0)


@pytest.mark.gpu
def test_on_a_gpu_it_is_read_before_what_was_enqueued_behind_it_has_ended() -> None:
    """Else the host would wait in each step until the device has nothing left to do."""
    device = torch.device("cuda", 0)
    agreement = Agreement(None, device)
    agreement.start(replace(ballot(), loss=torch.zeros((), dtype=torch.float64, device=device))).read()
    large = torch.randn(8192, 8192, device=device)
    large @ large
    torch.cuda.synchronize()
    loss = torch.full((), 1.25, dtype=torch.float64, device=device)
    pending = agreement.start(replace(ballot(next_targets=7), loss=loss))
    for _ in range(50):
        large = large @ large * 1e-4
    behind = torch.cuda.Event()
    behind.record()
    agreed = pending.read()
    assert not behind.query()
    assert (agreed.loss, agreed.next_targets, pending.next_targets.item()) == (1.25, 7, 7.0)
