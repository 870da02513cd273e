"""Choices are found again by the values of their rows, and taken over where the scores call it a tie."""

import torch

from allranks.verifying.routing import Choices, Place, Recorder, Replayer, fingerprints

PLACE = Place("layers.0.router", 4, 1)
ROWS = torch.randn(50, 16, generator=torch.Generator().manual_seed(3))
SCORES = torch.tensor([0.3, 0.301, 0.2, 0.199]).repeat(50, 1)


def recorded(chosen: torch.Tensor, place: Place = PLACE) -> Replayer:
    recorder = Recorder()
    recorder.decide(place, ROWS[:20], SCORES[:20], chosen[:20])
    recorder.decide(place, ROWS[20:], SCORES[20:], chosen[20:])
    return Replayer(recorder.recorded(), torch.bfloat16)


def chosen(number: int) -> torch.Tensor:
    return torch.full((50, 1), number)


def test_a_tie_is_decided_as_before_wherever_its_row_is_now() -> None:
    before = torch.arange(50).remainder(2).unsqueeze(1)
    replayer = recorded(before)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:30]
    moved = ROWS[order] * (1 + 0.02 * torch.randn(30, 16, generator=torch.Generator().manual_seed(2)))
    other = replayer.decide(PLACE, moved, SCORES[order], chosen(1)[:30])
    assert other is not None and torch.equal(other, before[order])
    assert (replayer.recognised, replayer.replayed) == (30, int((before[order] == 0).sum()))


def test_what_is_no_tie_stays() -> None:
    assert recorded(chosen(2)).decide(PLACE, ROWS, SCORES, chosen(1)) is None
    float16 = Replayer(recorded(chosen(0)).recorded, torch.float16)
    assert float16.decide(PLACE, ROWS, SCORES, chosen(1)) is not None
    wider = SCORES + torch.tensor([-0.005, 0.0, 0.0, 0.0])
    assert float16.decide(PLACE, ROWS, wider, chosen(1)) is None
    assert recorded(chosen(0)).decide(PLACE, ROWS, wider, chosen(1)) is not None


def test_nothing_is_taken_from_rows_that_are_others_or_from_elsewhere() -> None:
    replayer = recorded(chosen(0))
    strange = torch.randn(50, 16, generator=torch.Generator().manual_seed(9))
    assert replayer.decide(PLACE, strange, SCORES, chosen(1)) is None and replayer.recognised == 0
    assert replayer.decide(PLACE._replace(module="layers.1.router"), ROWS, SCORES, chosen(1)) is None
    assert recorded(chosen(1)).decide(PLACE, ROWS, SCORES, chosen(1)) is None


def test_candidates_that_are_masked_tie_with_each_other_alone() -> None:
    place = PLACE._replace(num_chosen=3)
    masked = torch.tensor([0.3, 0.3, -torch.inf, -torch.inf]).repeat(2, 1)
    rows, own = ROWS[:2], torch.tensor([[0, 1, 2], [0, 1, 2]])
    known = Choices(fingerprints(rows), torch.tensor([[1, 0, 3], [1, 2, 0]]))
    other = Replayer({place: known}, torch.bfloat16).decide(place, rows, masked, own)
    assert other is not None and other.tolist() == [[1, 0, 3], [0, 1, 2]]


def test_fingerprints_keep_distances() -> None:
    wide = torch.randn(40, 2048, generator=torch.Generator().manual_seed(4))
    apart, kept = torch.cdist(wide, wide), torch.cdist(fingerprints(wide), fingerprints(wide)) / 32**0.5
    ratio = (kept / apart)[~torch.eye(40, dtype=torch.bool)]
    assert float(ratio.min()) > 0.5 and float(ratio.max()) < 1.6
