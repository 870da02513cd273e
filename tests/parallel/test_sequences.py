"""Which entries of a batch are sequences, and who has which of their positions."""

from typing import Any

import pytest
import torch

from allranks.errors import LayoutError
from allranks.parallel.sequences import Sequences, Share, find_sequences, shorten

X = torch.arange(24).view(2, 12)


def test_shares_are_chunks_in_order() -> None:
    parts = [Share(rank, 3).take(X, 1) for rank in range(3)]
    assert torch.equal(torch.cat(parts, 1), X)
    assert all(part.is_contiguous() for part in parts)


def test_balanced_shares_are_mirror_images() -> None:
    """Under a causal mask position p has p + 1 keys: every rank has as many in all."""
    places = [Share(rank, 3, balanced=True).positions(12, torch.device("cpu")) for rank in range(3)]
    assert [part.tolist() for part in places] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert len({int((part + 1).sum()) for part in places}) == 1


@pytest.mark.parametrize("balanced", [False, True])
def test_shares_are_joined_again_whole_or_shortened(balanced: bool) -> None:
    shares = [Share(rank, 2, balanced=balanced) for rank in range(2)]
    parts = [share.take(X, 1) for share in shares]
    assert torch.equal(shares[0].join(parts, 1), X)
    short = [shorten(part, -1, shares[0].own_chunks, 2) for part in parts]
    whole = shares[0].join(short, 1)
    assert whole[0].tolist() == ([0, 1, 3, 4, 6, 7, 9, 10] if balanced else [0, 1, 6, 7])
    found = Sequences({"x": -1}, "").shorten({"x": X, "y": X}, shares[0].num_chunks, 2)
    assert torch.equal(found["x"], whole) and found["y"] is X
    assert Sequences({"x": -1}, "").dim_in({"y": X, "x": X}) == 1


@pytest.mark.parametrize(
    ("share", "length", "message"),
    [
        (Share(0, 2), 127, r"^cp\(2\) does not divide the 127 positions of entry 'x': 126 or 128 do$"),
        (Share(0, 4), 3, r"^cp\(4\) does not divide the 3 positions of entry 'x': 4 does$"),
        (
            Share(0, 2, balanced=True),
            126,
            r"^2 \* cp\(2\) = 4 does not divide the 126 positions of entry 'x', because ring attention gives each "
            "process two chunks: 124 or 128 do$",
        ),
    ],
)
def test_a_length_that_does_not_divide_is_refused_with_the_nearest(share: Share, length: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Sequences({"x": 1}, "").cut({"x": torch.zeros(2, length)}, share)


def test_what_is_as_long_as_the_inputs_is_a_sequence() -> None:
    batch = {"x": X, "y": X, "weights": torch.ones(2, 12), "label": torch.ones(2), "other": torch.ones(2, 5), "n": 3}
    found = find_sequences(batch, (X,), {})
    assert found.dims == {"x": 1, "y": 1, "weights": 1}
    assert found.because == "they have the 12 positions of forward's first argument in dim 1"
    cut, length = found.cut(batch, Share(1, 2))
    assert length == 12
    assert torch.equal(cut["x"], X[:, 6:]) and torch.equal(cut["y"], X[:, 6:])
    assert cut["label"] is batch["label"] and cut["other"] is batch["other"] and cut["n"] == 3


@pytest.mark.parametrize(
    ("batch", "hints", "dims"),
    [
        ((X, X), {"0": 1}, {"0": 1}),
        ({"in": {"tokens": X.T}, "y": X}, {"in.tokens": 0, "y": -1}, {"in.tokens": 0, "y": -1}),
        ({"a_x": X, "b_x": X, "c": X}, {"*_x": 1}, {"a_x": 1, "b_x": 1}),
        (X, {"": 1}, {"": 1}),
    ],
)
def test_hints_name_entries(batch: Any, hints: dict[str, int], dims: dict[str, int]) -> None:
    found = find_sequences(batch, (), hints)
    assert (found.dims, found.because) == (dims, "hints().sequence_dims says so")
    assert found.cut(batch, Share(0, 2))[1] == 12


@pytest.mark.parametrize(
    ("batch", "hints", "message"),
    [
        ({"tokens": X}, {"token": 1}, "names 'token', which no tensor of the batch has; did you mean 'tokens'"),
        ({"x": X, "y": 1}, {"q": 1}, "names 'q', which no tensor of the batch has; the entries are 'x'"),
        ({"x": X}, {"x": 2}, r"entry 'x' has no dim 2: a int64 tensor \[2, 12\]"),
        ({"x": X}, {"x": 1, "*": 0}, "two of its names match entry 'x', with other dims"),
    ],
)
def test_a_hint_that_does_not_fit_is_refused(batch: Any, hints: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        find_sequences(batch, (X,), hints)


def test_inputs_that_are_shifted_are_refused_with_the_remedy() -> None:
    batch = {"tokens": X}
    with pytest.raises(LayoutError, match=r"forward gets 11 positions, .* let the dataset give inputs and targets of"):
        find_sequences(batch, (X[:, :-1],), {})
    with pytest.raises(LayoutError, match=r"forward gets no tensor \[samples, positions, ...\] from"):
        find_sequences({"x": torch.ones(2)}, (torch.ones(2),), {})


def test_batches_are_looked_at_anew() -> None:
    found = Sequences({"x": 1, "y": 1}, "")
    with pytest.raises(LayoutError, match="entry 'x' has 12 positions, entry 'y' has 10 positions: use cp=1"):
        found.cut({"x": X, "y": X[:, :10]}, Share(0, 2))
    with pytest.raises(LayoutError, match="without entry 'x', entry 'y', which cp cuts"):
        found.cut({"z": X}, Share(0, 2))
