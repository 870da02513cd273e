"""Looking from outside: logical names, digests of samples, dropouts, noise by sample, clipping."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from allranks.verifying import observation as look
from allranks.verifying.recording import Draw


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_wrappers_leave_the_names() -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(look.logical_parameters(Wrapped())) == names
    assert list(look.logical_parameters({"net": Wrapped()})) == [f"net.{name}" for name in names]
    assert look.logical_name("module._orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
    assert "1.running_mean" in look.logical_buffers(Wrapped())


def test_tied_parameters_are_there_under_both_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    found = look.logical_parameters(model)
    assert found["a.weight"] is found["b.weight"]


def test_samples_are_known_by_their_values() -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    whole = look.rows_of((x, y))
    assert look.rows_of((x[2:], y[2:])) == whole[2:] and len(set(whole)) == 4
    assert look.rows_of((x, y.flip(0))) != whole
    padded = torch.cat([y[:, None], torch.full((4, 1), -100)], 1)
    longer = torch.cat([y[:, None], torch.full((4, 5), -100)], 1)
    assert look.rows_of(padded) == look.rows_of(longer)
    assert len(look.rows_of((x, y[:2]))) == 1 and len(look.rows_of("text")) == 1


def test_dropouts_are_noted_and_let_everything_pass() -> None:
    observer = look.Observer()
    layer, x = nn.Dropout(0.5), torch.ones(4, 8)
    with observer.watching():
        first, second = layer(x), layer(x)
        nn.functional.dropout(x, 0.5, False)
    assert torch.equal(first, x) and torch.equal(second, x)
    assert [draw.shape for draw in observer.draws] == [(4, 8), (4, 8)]
    assert observer.draws[0].state != observer.draws[1].state
    with look.Observer(drops=True).watching():
        assert not torch.equal(layer(x), x)
    assert not torch.equal(nn.functional.dropout(torch.ones(100), 0.5), torch.ones(100))


def test_attention_under_a_name_of_the_programs_own_drops_nothing_and_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What cp puts in its place stays in a process, and a Task that has torch's own by name is refused under cp.
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    observer, x = look.Observer(), torch.randn(2, 1, 4, 8)
    plain = nn.functional.scaled_dot_product_attention(x, x, x)
    with observer.watching():
        by_name = scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        by_place = scaled_dot_product_attention(x, x, x, None, 0.5)
        scaled_dot_product_attention(x, x, x)
        let_pass = dropout(x, 0.5)
    assert torch.equal(by_name, plain) and torch.equal(let_pass, x)
    assert [draw.shape for draw in observer.draws] == [(2, 1, 4, 8)] * 3 and torch.equal(by_place, plain)
    assert not torch.equal(scaled_dot_product_attention(x, x, x, dropout_p=0.5), plain)


def test_a_recomputation_is_told_from_a_forward() -> None:
    observer, x = look.Observer(), torch.ones(2, 4, requires_grad=True)
    layer = nn.Dropout(0.5)
    with observer.watching():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert [draw.again for draw in observer.draws] == [False, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_dropout_at_the_end_of_a_block_is_made_again(reentrant: bool) -> None:
    observer, inner = look.Observer(), nn.Linear(3, 3)
    with observer.watching():
        block = nn.Sequential(inner, nn.Dropout(0.5))
        x = torch.ones(2, 3, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    assert [draw.again for draw in observer.draws] == [False, True]


def test_noise_belongs_to_the_sample() -> None:
    observer = look.Observer()
    with observer.watching():
        observer.feed([11, 12, 13])
        whole, again = torch.randn(3, 5), torch.rand_like(torch.zeros(3, 2, dtype=torch.float64))
        observer.feed([12, 13])
        part, more = torch.randn((2, 5)), torch.rand_like(torch.zeros(2, 2, dtype=torch.float64))
        free = torch.randn(7)
        drawn: list[Draw] = []
        observer.feed([], drawn)
        nn.functional.dropout(torch.ones(2))
        observer.feed([])
        nn.functional.dropout(torch.ones(2))
    assert torch.equal(part, whole[1:]) and torch.equal(more, again[1:])
    assert again.dtype == torch.float64 and free.shape == (7,)
    assert len(drawn) == 1


def test_noise_of_a_generator_of_its_own_belongs_to_the_sample_too_and_is_noted() -> None:
    def drawn(rows: list[int], own_noise: bool = False) -> tuple[list[torch.Tensor], list[Draw], torch.Tensor]:
        own, draws = torch.Generator().manual_seed(5), list[Draw]()
        observer = look.Observer(own_noise=own_noise)
        with observer.watching():
            observer.feed(rows, draws)
            values = [torch.randn(len(rows), 3, generator=own), torch.rand((len(rows), 3), generator=own)]
            torch.randn(7, 3, generator=own)
        return values, draws, own.get_state()

    whole, seen, after = drawn([11, 12, 13, 14], own_noise=True)
    part, others, _ = drawn([13, 14], own_noise=True)
    assert all(torch.equal(some, every[2:]) for some, every in zip(part, whole, strict=True))
    assert [(draw.shape, draw.own) for draw in seen] == [((4, 3), True)] * 2
    assert seen[0].state == others[0].state != seen[1].state  # of the generator's own state, which moves on
    plain, none, moved = drawn([11, 12, 13, 14])
    assert none == [] and torch.equal(after, moved) and not torch.equal(plain[0], whole[0])


def test_noise_is_counted_from_the_beginning_of_each_forward() -> None:
    observer = look.Observer()
    with observer.watching():
        observer.feed(lambda: [11, 12])
        first, second = torch.randn(2, 3), torch.randn(2, 3)
        observer.begin_forward()
        again = torch.randn(2, 3)
        observer.begin_forward([12])
        other = torch.randn(1, 3)
    assert torch.equal(first, again) and not torch.equal(first, second) and torch.equal(first[1:], other)


def test_clipping_tells_before_it_scales() -> None:
    told: list[float] = []
    observer = look.Observer(on_clip=lambda held, norm: told.append(float(norm) + float(held[0].grad.sum())))  # type: ignore[union-attr]
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    with observer.watching():
        nn.utils.clip_grad_norm_([parameter], 1.0)
    assert told == [pytest.approx(4.0 + 8.0)] and float(parameter.grad.norm()) == pytest.approx(1.0)


def test_shaking_moves_by_ulps() -> None:
    parameter = nn.Parameter(torch.ones(50, dtype=torch.float64))
    look.shake({"a": parameter, "b": parameter}, 1)
    moved = (parameter.detach() - 1).abs().max()
    assert 0 < float(moved) <= 2.3e-16


def test_values_of_samples_and_their_shapes() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
    whole, part = look.values_of({"x": x, "y": y}), look.values_of({"x": x[1:], "y": y[1:]})
    assert len(whole) == 3 and part == whole[1:] and len(set(whole)) == 3
    longer = look.values_of({"x": nn.functional.pad(x, (0, 1)), "y": y})
    assert longer[0][0] != whole[0][0] and len({shapes for shapes, _ in longer}) == 1
    assert look.values_of((x, torch.ones(2))) == look.values_of(3) == look.values_of(torch.ones(())) == []


def test_a_packed_batch_has_no_rows() -> None:
    """Atoms of several molecules one behind the other, and an energy for each molecule."""
    packed = {"places": torch.zeros(5, 3), "energies": torch.zeros(2)}
    assert not look.has_rows(packed) and len(look.rows_of(packed)) == 1
    assert look.has_rows({"x": torch.zeros(5, 3), "y": np.zeros(5)})
    assert not look.has_rows([1, 2]) and not look.has_rows(torch.ones(()))
