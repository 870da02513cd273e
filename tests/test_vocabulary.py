"""Cut logits are no tensor, and say so; everything that walks through outputs finds the tensor in them."""

import torch
from pytest import raises
from torch.nn import functional
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.losses import cross_entropy
from allranks.vocabulary import CutLogits, CutVocabulary, find_cut, whole_logits

WORDS = 5


class Alone(CutVocabulary):
    """One rank that has words 1 to 3 of five; the others would have minus infinity."""

    start, end, num_words, axis = 1, 4, WORDS, "tp=2"

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Nobody adds anything."""
        return value

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """Nobody has more."""
        return value

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The others' words are not to be had."""
        return functional.pad(part, (1, 1), value=-torch.inf)


def test_it_is_cross_entropy_over_the_last_dim() -> None:
    logits = torch.randn(3, 2, WORDS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[0, 4], [-100, 1], [2, 2]])
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 2)
    assert torch.equal(cross_entropy(logits, targets, reduction="none"), expected)
    assert torch.allclose(cross_entropy(logits, targets), expected.sum(), rtol=1e-15)
    other = cross_entropy(logits[0], targets[0], ignore_index=4, reduction="none")
    assert torch.equal(other, torch.tensor([float(expected[0, 0]), 0.0], dtype=torch.float64))


def test_cut_logits_give_the_loss_of_whole_ones() -> None:
    part = torch.tensor([[0.5, -1.0, 700.0], [1.0, 2.0, 3.0]], requires_grad=True)
    cut, targets = CutLogits(part, Alone()), torch.tensor([3, 1])
    found = cross_entropy(cut, targets, reduction="none")
    expected = functional.cross_entropy(cut.whole(), targets, reduction="none")
    assert torch.allclose(found, expected) and found[0] == 0


def test_logits_in_a_lower_type_are_raised_before_they_are_summed() -> None:
    cut = CutLogits(torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16), Alone())
    assert cross_entropy(cut, torch.tensor([1])).dtype is torch.float32


def test_what_does_not_fit_is_refused() -> None:
    with raises(ValueError, match=r"logits \[2, 3\], targets \[3\]: expected"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    for wrong in (-1, WORDS):
        with raises(IndexError, match="a target outside of 0 to 4"):
            cross_entropy(CutLogits(torch.zeros(1, 3), Alone()), torch.tensor([wrong]))


def test_whoever_takes_it_for_a_tensor_is_told() -> None:
    cut = CutLogits(torch.zeros(1, 3), Alone())
    advice = "words 1 to 3 of 5 \\(tp=2\\), because hints\\(\\).loss_parallel says so"
    with raises(LayoutError, match=f"^argmax\\(\\) meets logits of which this process has {advice}"):
        torch.argmax(cut)  # type: ignore[arg-type]
    with raises(LayoutError, match=f"^cross_entropy\\(\\) meets .*{advice}"):
        functional.cross_entropy(cut, torch.tensor([1]))  # type: ignore[arg-type]
    with raises(LayoutError, match=f"^.shape meets .*{advice}"):
        _ = cut.shape
    with raises(LayoutError, match=advice):
        _ = cut[0]
    with raises(AttributeError, match="CutLogits has no logits"):
        _ = cut.logits


def test_a_pytree_has_its_tensor_inside() -> None:
    cut = CutLogits(torch.ones(1, 3), Alone())
    output = {"logits": cut, "rest": (torch.zeros(2), None)}
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.double(), output)
    assert doubled["logits"].part.dtype is torch.float64 and doubled["logits"].vocabulary is cut.vocabulary
    assert find_cut(output) == [cut]
    whole = whole_logits(output)
    assert whole["logits"].shape == (1, WORDS) and whole["rest"][1] is None and find_cut(whole) == []
