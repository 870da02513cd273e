"""Looking from outside: logical names, digests of samples, dropouts, noise by sample, clipping."""

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from allranks.verifying.observer import Observer
from allranks.verifying.recording import Draw


def test_dropouts_are_noted_and_let_everything_pass() -> None:
    observer = Observer()
    layer, x = nn.Dropout(0.5), torch.ones(4, 8)
    with observer.watching():
        first, second = layer(x), layer(x)
        nn.functional.dropout(x, 0.5, False)
    assert torch.equal(first, x) and torch.equal(second, x)
    assert [draw.shape for draw in observer.draws] == [(4, 8), (4, 8)]
    assert observer.draws[0].state != observer.draws[1].state
    with Observer(drops=True).watching():
        assert not torch.equal(layer(x), x)
    assert not torch.equal(nn.functional.dropout(torch.ones(100), 0.5), torch.ones(100))


def test_attention_under_a_name_of_the_programs_own_drops_nothing_and_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What cp puts in its place stays in a process, and a Task that has torch's own by name is refused under cp.
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    observer, x = Observer(), torch.randn(2, 1, 4, 8)
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
    observer, x = Observer(), torch.ones(2, 4, requires_grad=True)
    layer = nn.Dropout(0.5)
    with observer.watching():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert [draw.again for draw in observer.draws] == [False, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_dropout_at_the_end_of_a_block_is_made_again(reentrant: bool) -> None:
    observer, inner = Observer(), nn.Linear(3, 3)
    with observer.watching():
        block = nn.Sequential(inner, nn.Dropout(0.5))
        x = torch.ones(2, 3, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    assert [draw.again for draw in observer.draws] == [False, True]


def test_noise_belongs_to_the_sample() -> None:
    observer = Observer()
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
        observer = Observer(own_noise=own_noise)
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


def test_noise_of_the_shared_generator_moves_it_on_and_is_noted() -> None:
    """What is drawn next, for a dropout say, begins where it would without anybody watching."""

    def states() -> list[torch.Tensor]:
        torch.manual_seed(3)
        torch.randn(2, 5)
        first = torch.get_rng_state()
        torch.rand_like(torch.zeros(2, 3))
        return [first, torch.get_rng_state()]

    plain, observer, draws = states(), Observer(), list[Draw]()
    with observer.watching():
        observer.feed([11, 12], draws)
        seen = states()
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
    assert [(draw.shape, draw.shared, draw.own, draw.noise) for draw in draws] == [
        ((2, 5), True, False, True),
        ((2, 3), True, False, True),
    ]
    assert draws[0].state != draws[1].state


def test_noise_of_another_salt_is_another() -> None:
    def drawn(salt: int) -> list[torch.Tensor]:
        observer = Observer(own_noise=True, salt=salt)
        with observer.watching():
            observer.feed([11, 12])
            return [torch.randn(2, 3), torch.randn(2, 3, generator=torch.Generator().manual_seed(1))]

    (plain, own), (salted, same) = drawn(0), drawn(1)
    assert not torch.equal(plain, salted) and torch.equal(own, same)


def test_one_number_for_each_sample_is_noise_too() -> None:
    """The times of a flow, say; of the shared generator, and where nobody has seen that it is by chance."""

    def drawn(rows: list[int], *, least_dims: int = 1) -> tuple[torch.Tensor, list[Draw]]:
        observer, draws = Observer(own_noise=True, least_dims=least_dims), list[Draw]()
        torch.manual_seed(3)
        with observer.watching():
            observer.feed(rows, draws)
            found = torch.rand(len(rows))
            torch.rand(len(rows), generator=torch.Generator().manual_seed(4))
            torch.rand(()), torch.rand(7)
        return found, draws

    whole, seen = drawn([11, 12, 13])
    part, _ = drawn([12, 13])
    assert torch.equal(part, whole[1:]) and [(draw.shape, draw.single) for draw in seen] == [((3,), True)]
    plain, none = drawn([11, 12, 13], least_dims=2)
    assert none == [] and not torch.equal(plain, whole)


def test_noise_is_counted_from_the_beginning_of_each_forward() -> None:
    observer = Observer()
    with observer.watching():
        observer.feed(lambda: [11, 12])
        first, second = torch.randn(2, 3), torch.randn(2, 3)
        observer.begin_forward()
        again = torch.randn(2, 3)
        observer.begin_forward([12])
        other = torch.randn(1, 3)
    assert torch.equal(first, again) and not torch.equal(first, second) and torch.equal(first[1:], other)


def test_noise_that_is_computed_again_is_that_of_the_forward() -> None:
    """Whatever has been drawn since, and whichever samples are in work then."""

    def gradient(recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        observer, x = Observer(), torch.ones(2, 3, requires_grad=True)

        def block(value: torch.Tensor) -> torch.Tensor:
            return (value + torch.randn_like(value)) * torch.rand(2, 3)

        with observer.watching():
            observer.feed([11, 12])
            inner = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            last = torch.randn(2, 3)
            observer.begin_forward([13, 14])
            (inner**2).sum().backward()
        assert x.grad is not None
        return x.grad, last

    for one, other in zip(gradient(False), gradient(True), strict=True):
        assert torch.equal(one, other)


def test_noise_of_a_micro_batch_belongs_to_its_samples() -> None:
    """In an own loop, which takes them one by one, however often; what it draws apart from them is for none."""

    def drawn(rows: list[list[int]]) -> list[torch.Tensor]:
        observer = Observer()
        with observer.watching():
            observer.feed([row for some in rows for row in some], [])
            batches = observer.handing([torch.zeros(len(some), 3) for some in rows], rows)
            found = [torch.cat([torch.randn_like(batch) for batch in batches]) for _ in range(2)]
            if len(rows) > 1:
                assert len(batches) == 2 and len(batches[:1]) == 1
                assert torch.rand_like(batches[1]).shape == (1, 3) and observer.unclaimed == set()
                list(batches)
                torch.randn(2, 3)
                assert observer.unclaimed == {(2, 3)}
        return found

    whole, parts = drawn([[11, 12, 13]]), drawn([[11, 12], [13]])
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert not torch.equal(whole[0], whole[1])


class Taken:
    """Three micro-batches of an own loop, of two samples each; what is drawn for the first goes by its samples?"""

    def __init__(self) -> None:
        self.observer, self.weight = Observer(), torch.ones(3, requires_grad=True)
        self.rows = [[11, 12], [13, 14], [15, 16]]
        self.observer.feed([row for some in self.rows for row in some], [])
        self.batches = self.observer.handing([torch.zeros(2, 3) for _ in self.rows], self.rows)

    def work(self) -> list[int]:
        """The samples for which a forward would draw."""
        (torch.zeros(2, 3) * self.weight).sum().backward()
        return [*self.observer.rows()]


def test_a_loop_that_looks_ahead_does_not_tell_which_micro_batch_is_in_work() -> None:
    """The last taken was held for it: the noise of each was made of the samples of the next."""
    loop = Taken()
    now, seen = loop.batches[0], []
    for place in range(len(loop.batches)):
        following = loop.batches[place + 1] if place < 2 else None
        assert now is not following
        seen.append(loop.work())
        now = following
    assert seen == [[11, 12, 13, 14, 15, 16]] * 3
    with loop.observer.watching():
        torch.randn(2, 3)
    assert loop.observer.unclaimed == {(2, 3)} and loop.observer.draws == []


def test_a_look_through_the_micro_batches_before_leaves_them_known() -> None:
    """Their targets are counted first, say; and a micro-batch may be taken twice, or only drawn for."""
    for look_through in (lambda some: [some[place] for place in range(3)], list):
        loop = Taken()
        look_through(loop.batches)
        for place in range(3):
            assert loop.batches[place] is loop.batches[place] and loop.work() == loop.rows[place]
            assert loop.batches[place] is not None
        assert [loop.work() for _ in loop.batches] == loop.rows
    loop = Taken()
    with loop.observer.watching():
        for place in range(3):
            torch.randn_like(loop.batches[place])
    assert len(loop.observer.draws) == 3 and loop.observer.unclaimed == set()
    loop = Taken()
    loop.rows[0].clear()  # a filler, which is passed over
    assert [loop.work() if rows else [] for rows, _ in zip(loop.rows, loop.batches, strict=True)] == loop.rows


def test_what_has_no_row_for_each_sample_is_noted_in_steps_alone() -> None:
    observer = Observer()
    with observer.watching():
        for rows, draws in (([11, 12], None), ([], []), ([11, 12], [])):
            assert observer.unclaimed == set()
            observer.feed(rows, draws)
            torch.randn(4, 3), torch.rand(2, 5)
    assert observer.unclaimed == {(4, 3)}


def test_clipping_tells_before_it_scales() -> None:
    told: list[float] = []
    observer = Observer(on_clip=lambda held, norm: told.append(float(norm) + float(held[0].grad.sum())))  # type: ignore[union-attr]
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    with observer.watching():
        nn.utils.clip_grad_norm_([parameter], 1.0)
    assert told == [pytest.approx(4.0 + 8.0)] and float(parameter.grad.norm()) == pytest.approx(1.0)


def test_what_is_compiled_drops_nothing_and_is_not_noted() -> None:
    """A compiler calls a dropout once, on tensors without values, and looks into attention and noise."""

    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            attended = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            return nn.functional.dropout(attended, 0.5, self.training)

    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.numel()).reshape(x.shape)

    x = torch.randn(2, 3, 4)
    expected = nn.functional.scaled_dot_product_attention(x, x, x)
    observer, draws = Observer(), list[Draw]()
    with observer.watching():
        observer.feed([1, 2], draws)
        compiled = torch.compile(Drops(), backend="aot_eager")
        before = observer.compiled
        for _ in range(2):
            assert torch.allclose(compiled(x), expected)
        assert (before, observer.compiled, draws) == (False, True, [])
        assert torch.compile(Noisy(), backend="aot_eager")(x).shape == x.shape
    torch._dynamo.reset()
