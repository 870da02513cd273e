"""Laws 1 and 2 of docs/explanation/concepts.md in plain python: where samples stand, how steps are cut.

It imports nothing of allranks: `allranks verify` takes order, cut and schedule from the same code on both of its sides,
and so proves none of them. This is what they are held to.
"""

import itertools
import math

WORD = 2**64
Rows = list[list[list[list[int]]]]
"""[step][micro-step][rank][row]: the numbers of samples; a filler has none."""


def stirred(word: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def key_of(seed: int, epoch: int) -> int:
    """Of the order of an epoch."""
    word = 0
    for value in (0x4550, seed, epoch):
        word = stirred((word * 0x2545F4914F6CDD1D + 0x9E3779B97F4A7C15 + value) % WORD)
    return word % 2**63


def sample_at(place: int, num_samples: int, key: int) -> int:
    """The sample at a place of an epoch: 16 rounds of a Feistel network, walked until they lie among the samples."""
    bits = max(2, (num_samples - 1).bit_length())
    small = bits // 2
    large = bits - small
    keys = [stirred((key + turn * 0x9E3779B97F4A7C15) % WORD) for turn in range(1, 17)]

    def hashed(half: int, with_key: int, bits_of_other: int) -> int:
        word = (half + with_key) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 32)) * 0x94D049BB133111EB % WORD
        return word >> (64 - bits_of_other)

    while True:
        high, low = divmod(place, 2**small)
        for turn in range(0, 16, 2):
            high ^= hashed(low, keys[turn], large)
            low ^= hashed(high, keys[turn + 1], small)
        place = high * 2**small + low
        if place < num_samples:
            return place


def samples_of(first: int, past: int, num_samples: int, seed: int) -> list[int]:
    """The samples at positions from `first` on; epochs run end to end, each with an order of its own."""
    return [
        sample_at(position % num_samples, num_samples, key_of(seed, position // num_samples))
        for position in range(first, past)
    ]


def near_equal(things: list[int], number: int) -> list[list[int]]:
    """Consecutive parts, the larger ones first."""
    base, larger = divmod(len(things), number)
    ends = [0]
    for part in range(number):
        ends.append(ends[-1] + base + (part < larger))
    return [things[begin:end] for begin, end in itertools.pairwise(ends)]


def cut(samples: list[int], num_micro_steps: int, num_ranks: int) -> list[list[list[int]]]:
    """[micro-step][rank][row]: first into micro-steps, then each of those over the ranks.

    Who has one sample more than others takes turns, from one micro-step to the next.
    """
    found, turn = [], 0
    for micro_step in near_equal(samples, num_micro_steps):
        base, extras = divmod(len(micro_step), num_ranks)
        lucky = {(turn + extra) % num_ranks for extra in range(extras)}
        turn += extras
        begin, ranks = 0, []
        for rank in range(num_ranks):
            end = begin + base + (rank in lucky)
            ranks.append(micro_step[begin:end])
            begin = end
        found.append(ranks)
    return found


def steps(
    num_samples: int,
    seed: int,
    global_batch: int,
    num_ranks: int,
    *,
    epochs: int | None = None,
    num_steps: int | None = None,
    micro_batch: int | None = None,
    micro_steps: int | None = None,
) -> Rows:
    """All steps of a run: `epochs` or `num_steps` say where it ends, and only the last batch of epochs may be short."""
    past = global_batch * (num_steps or 0) if epochs is None else num_samples * epochs
    found = []
    for first in range(0, past, global_batch):
        samples = samples_of(first, min(past, first + global_batch), num_samples, seed)
        number = 1
        if micro_steps is not None:
            number = min(micro_steps, len(samples))
        elif micro_batch is not None:
            number = math.ceil(len(samples) / (num_ranks * micro_batch))
        found.append(cut(samples, number, num_ranks))
    return found


def factor(name: str, step: int, warmup: int, end: int, floor: float) -> float:
    """Of the peak rate in step `step` (from 0), in steps: a straight rise, then the shape, which ends at `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    done = 0.0 if end <= warmup else min(1.0, (step - warmup) / (end - warmup))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[name]
    return 1.0 if name == "constant" else floor + (1 - floor) * shape
