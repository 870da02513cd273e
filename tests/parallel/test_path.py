"""Which units the ranks enter, and what is said where they differ."""

import torch
from torch import nn

from allranks.parallel.path import DIGEST_BITS, Path, differ, path_digest


def test_forwards_are_noted_in_order_until_taken() -> None:
    path, model = Path(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path.follow(model, "")
    path.follow(model[1], "1")
    model(torch.ones(2))
    model[1](torch.ones(2))
    assert path.told() == {0: (("", "1", path.END, "1"), False)}
    assert path.take() == ("", "1", path.END, "1")
    assert path.told() == {0: (("", "1", path.END, "1"), True), 1: ((), False)}
    assert path.take() == ()


def test_a_unit_is_noted_before_anything_waits_for_its_parameters() -> None:
    path, model, found = Path(), nn.Linear(2, 2), list[tuple[str, ...]]()
    model.register_forward_pre_hook(lambda *_: found.append(path.take()))
    path.follow(model, "1")
    model(torch.ones(2))
    assert found == [("1",)]


def test_any_single_rank_that_differs_is_seen_and_no_number_of_equal_ones_is() -> None:
    largest = (1 << DIGEST_BITS) - 1
    for num_ranks in (1, 2, 3, 1000, 100_000):
        for digest in (0, 1, 12345, largest):
            total, squares = float(num_ranks) * digest, float(num_ranks) * digest**2
            assert not differ(num_ranks, total, squares)
            if num_ranks > 1 and digest:
                assert differ(num_ranks, total - 1, squares - digest**2 + (digest - 1) ** 2)


def test_paths_have_digests_that_tell_them_apart() -> None:
    paths = [(), ("",), ("", "blocks.0"), ("", "blocks.1"), ("", "blocks.1", "blocks.0")]
    assert len({path_digest(path) for path in paths}) == len(paths)
    assert all(0 <= path_digest(path) < 1 << DIGEST_BITS for path in paths)
