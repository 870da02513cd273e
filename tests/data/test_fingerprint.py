"""Digests of a few samples: alike where the data is, other where it is not, and never in the way."""

import time
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from allranks.data import fingerprint
from allranks.data.cut import Cut
from allranks.data.fingerprint import NUM_SAMPLES, digest_at, find_others, take_fingerprint
from allranks.data.stream import DataStream
from allranks.left_out import LeftOut
from tests.data.test_resuming import Endless

Pair = namedtuple("Pair", "x y")


@dataclass
class Labelled:
    """As some datasets give their samples."""

    x: Any
    label: int


class Samples:
    """A list that notes what is loaded, or does something else for a number."""

    def __init__(self, *samples: Any) -> None:
        self.samples = list(samples)
        self.loaded = list[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        found = self.samples[index]
        return found() if callable(found) else found


def stream_of(dataset: Any, left_out: str = "") -> DataStream:
    return DataStream(dataset, cut=Cut(1), seed=3, left_out=LeftOut.parse(left_out))


KINDS: tuple[Any, ...] = (
    *(torch.arange(4), torch.arange(4.0), torch.arange(4).reshape(2, 2), torch.tensor([1j]).conj(), torch.tensor(True)),
    *(np.arange(4), np.arange(4, dtype=np.int32), np.arange(4)[::-1], np.float32(1.5), np.float64(1.5)),
    *(None, True, 1, 1.0, "1", b"1", [1], [[1]], [1, 2], {"a": 1}, {"a": 2}, {"b": 1}, Labelled(1, 2), Labelled(2, 1)),
    *(torch.ones(2, dtype=torch.bfloat16), torch.empty(0), {"a": {"a": 1}}, ("1", ""), ("", "1")),
)


def test_no_two_kinds_of_samples_are_alike_and_each_is_itself() -> None:
    once, again = (stream_of(Samples(*KINDS)) for _ in range(2))
    digests = [digest_at(once, number) for number in range(len(KINDS))]
    assert None not in digests and len(set(digests)) == len(KINDS)
    assert digests == [digest_at(again, number) for number in range(len(KINDS))]
    same = stream_of(Samples({"x": 1, "y": 2}, {"y": 2, "x": 1}, Pair(1, 2), (1, 2), [1, 2]))
    digests = [digest_at(same, number) for number in range(5)]
    assert digests[0] == digests[1] and digests[2] == digests[3] == digests[4], "a batch of them is"


@pytest.mark.parametrize("sample", [object(), {"x": {1, 2}}, torch.eye(2).to_sparse(), [torch.empty(1, device="meta")]])
def test_what_has_no_bytes_that_mean_the_same_tomorrow_has_no_digest(sample: Any) -> None:
    assert digest_at(stream_of(Samples(sample)), 0) is None
    assert take_fingerprint(stream_of(Samples(sample, 1))).keys() == {"1"}


def test_the_first_of_the_order_are_looked_at_but_for_what_is_left_out() -> None:
    dataset = Samples(*range(100))
    stream = stream_of(dataset)
    order = stream.samples_at(np.arange(100)).tolist()
    assert list(take_fingerprint(stream)) == [str(one) for one in order[:NUM_SAMPLES]]
    dataset.loaded.clear()
    assert list(take_fingerprint(stream_of(dataset, "0:4,8:200"))) == [str(one) for one in order[4:8]]
    assert dataset.loaded == order[4:8]
    assert len(take_fingerprint(stream_of(Samples(*range(5))))) == 5
    assert take_fingerprint(stream_of(Endless())) == {}


def test_what_is_drawn_is_the_same_and_no_draw_of_the_callers() -> None:
    stream = stream_of(Samples(lambda: torch.rand(2), np.random.rand))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert take_fingerprint(stream) == take_fingerprint(stream)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *(2.0 * number for number in range(1, 99))])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert len(take_fingerprint(stream_of(Samples(*range(50))))) == 3


def test_a_sample_that_cannot_be_read_is_another_one_than_it_was() -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error\nand more", "data.bin")

    good, bad = stream_of(Samples(*range(8))), stream_of(Samples(*range(7), fail))
    was, now = take_fingerprint(good), take_fingerprint(bad)
    assert now["7"].startswith(f"{fingerprint.UNREADABLE}OSError: [Errno 5] Input/output error")
    assert "\n" not in now["7"]
    assert find_others(was, now) == ["7"] and find_others(now, was) == [], "it has been mended"
    assert find_others(was, {**was, "1": "other", "99": "new"}) == ["1"] and find_others({}, was) == []
