"""An iterable dataset that can be read only once is found out before it loses samples."""

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from allranks.data.random_keys import item_key, seed_all
from allranks.data.second_pass import are_alike, begin_pass, check_begins_anew, check_second_pass
from allranks.errors import DataError


class Source:
    """What `make` gives; `order` as declared."""

    def __init__(self, make: Callable[[], Any], order: str = "global") -> None:
        self.make, self.order, self.epochs = make, order, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


class Inner(Source):
    """The same, from a generator of its own for each pass."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.make()


class Once:
    """Its own iterator, with an order."""

    order = "global"
    left = 64

    def __iter__(self) -> "Once":
        return self

    def __next__(self) -> int:
        self.left -= 1
        return self.left


def look(dataset: Any, count: int = 5) -> None:
    """The first look, and then the second."""
    found = begin_pass(dataset, 3)
    samples = []
    for position in range(count):
        seed_all(item_key(3, 0, position))
        samples.append(next(found))
    check_second_pass(dataset, 3, found, samples[0])


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize("order", ["global", "sharded"])
@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (lambda: (number for number in range(64)), "generator .* each iter.. on it gives the same iterator"),
        (Once, "Once .* each iter.. on it gives the same iterator"),
        (lambda: Source(constant(iter(range(64)))), "Source .* each iter.. on it gives the same iterator"),
        (lambda: Inner(constant(iter(range(5)))), "Inner .* a second pass over it is empty"),
    ],
)
def test_what_can_be_read_once_is_refused(dataset: Callable[[], Any], reason: str, order: str) -> None:
    made = dataset()
    if isinstance(made, Source | Once):
        made.order = order
    with pytest.raises(DataError, match="return an object whose __iter__ begins anew") as caught:
        look(made)
    assert "\n" not in str(caught.value)
    caught.match(reason.replace(" .* ", " cannot be read from its beginning again: "))


@pytest.mark.parametrize("make", [lambda: iter(range(64)), lambda: iter(range(1))])
def test_what_nobody_has_read_yet_is_refused_too(make: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match="Inner cannot be read from its beginning again"):
        check_begins_anew(Inner(constant(make())), 3)


@pytest.mark.parametrize("dataset", [[1, 2], [], Inner(lambda: range(3)), Inner(lambda: ()), Source(lambda: range(1))])
def test_what_nobody_has_read_yet_begins_anew_or_has_nothing(dataset: Any) -> None:
    check_begins_anew(dataset, 3)


def test_a_second_pass_that_goes_on_where_the_first_was_left_is_refused() -> None:
    lines = io.StringIO("".join(f"{number}\n" for number in range(64)))
    with pytest.raises(DataError, match="under the same seeds, begins with another item"):
        look(Inner(constant(lines)))
    # What shards itself may be random, so that another item proves nothing.
    look(Inner(lambda: (random.Random().random() for _ in range(9)), "sharded"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: range(64),
        lambda: ({"x": torch.rand(3), "y": np.random.rand(2), "z": random.random()} for _ in range(64)),
        lambda: ([object()] for _ in range(64)),
        lambda: (number for number in [float("nan")] * 9),
    ],
)
@pytest.mark.parametrize("kind", [Source, Inner])
def test_what_begins_anew_passes(kind: type[Source], make: Callable[[], Any]) -> None:
    dataset = kind(make)
    look(dataset)
    assert dataset.epochs == [0, 0], "begun as in training"


def test_what_shuffles_where_it_begins_passes() -> None:
    class Shuffled(Source):
        def __iter__(self) -> Iterator[tuple[int, float]]:
            order = random.sample(range(1000), 64)
            return ((number, random.random()) for number in order)

    look(Shuffled(list))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        ("a", "b"),
        (None, 1),
        (np.float32(1), np.float32(2)),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.ones(2)),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(()), torch.ones(())),
        ({"x": [1, 2]}, {"x": [1, 2, 3]}),
        ((object(), 1), (object(), 2)),
    ],
)
def test_items_that_differ(one: Any, other: Any) -> None:
    assert not are_alike(one, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"x": torch.arange(3), "y": (np.arange(3), "text", b"bytes", None, True)},
        lambda: [float("nan"), torch.tensor([1.0, float("nan")]), np.array([float("nan")])],
        lambda: [torch.tensor(1j).conj(), torch.tensor([True]), torch.ones(2, 3).T, torch.zeros(0)],
        lambda: [np.array([object()]), object(), torch.eye(2).to_sparse(), torch.empty(2, device="meta")],
        lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
    ],
)
def test_items_that_are_alike(make: Callable[[], Any]) -> None:
    assert are_alike(make(), make())


class Resetting:
    """Its own iterator, set back to the beginning by each iter()."""

    order = "global"

    def __iter__(self) -> "Resetting":
        self.number = 0
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number > 64:
            raise StopIteration
        return self.number


@pytest.mark.parametrize("order", ["global", "sharded"])
def test_an_iterator_that_is_set_back_begins_anew(order: str) -> None:
    dataset = Resetting()
    dataset.order = order
    found = begin_pass(dataset, 3)
    first = next(found)
    next(found)
    check_second_pass(dataset, 3, found, first)
