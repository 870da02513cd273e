"""What both sides of `allranks verify` take from one place is what the laws say, in plain python (`plain_law.py`).

One device of verify is fed by `data.cut`, `data.stream`, `data.loader` and `data.evaluation`, at the rates of
`stepping.session.make_schedule`, as the ranks are: a mistake there would be on both sides, and verify would not see it.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from allranks.config import resolve_config
from allranks.data.cut import cut_step
from allranks.data.evaluation import evaluation_batches
from allranks.data.loader import Loader
from allranks.data.stream import DataStream
from allranks.layout import Layout
from allranks.stepping.session import make_schedule
from tests.verifying import plain_law


class Numbers(Dataset[Any]):
    """The number of each sample."""

    draws = False

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"number": torch.tensor(index)}


class Noisy(Numbers):
    """The same, with a random number beside each."""

    draws = True

    def __getitem__(self, index: int) -> Any:
        return {"number": torch.tensor(index), "noise": torch.rand((), dtype=torch.float64)}


def config_of(global_batch: int, *words: str) -> Any:
    return resolve_config(task_defaults={}, toml=None, overrides=[f"train.global_batch={global_batch}", *words])


def stream_of(config: Any, dataset: Any, num_ranks: int, rank: int, *, fixed: bool = False) -> DataStream:
    """As session and TaskAlone make it."""
    train = config.train
    cut = cut_step(train, Layout(dp_replicate=num_ranks), fixed=fixed)
    return DataStream(dataset, cut=cut, dp_rank=rank, seed=train.seed, epochs=train.epochs, steps=train.steps)


def fed(config: Any, length: int, num_ranks: int, *, fixed: bool = False) -> plain_law.Rows:
    """What a Loader really gives to each rank: the values in its batches, those of fillers aside."""
    found: list[list[list[list[int]]]] = []
    for rank in range(num_ranks):
        with Loader(stream_of(config, Numbers(length), num_ranks, rank, fixed=fixed), draws=False) as loader:
            for index, step in enumerate(loader):
                found += [[[] for _ in step.micro_steps]] * (rank == 0)
                for micro, into in zip(step.micro_steps, found[index], strict=True):
                    rows = micro.batch["number"].tolist()
                    assert micro.weight in (0, 1) and len(rows) >= 1
                    into.append(rows if micro.weight else [])
                    assert micro.samples.tolist() == into[-1] and len(micro.positions) == len(into[-1])
    return found


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    num_ranks = draw(st.integers(1, 5))
    global_batch = draw(st.integers(num_ranks, 17))
    case: dict[str, Any] = {"length": draw(st.integers(global_batch, 40)), "seed": draw(st.integers(0, 2**31))}
    case |= {"num_ranks": num_ranks, "global_batch": global_batch, "epochs": None, "num_steps": None}
    case |= draw(st.sampled_from(({"epochs": 1}, {"epochs": 2}, {"num_steps": 4})))
    how = draw(st.sampled_from(("micro_batch", "micro_steps", "")))
    return case | ({how: draw(st.integers(1, global_batch))} if how else {})


@settings(max_examples=60, deadline=None)
@given(runs())
def test_rows_and_cut_of_each_step(case: dict[str, Any]) -> None:
    length, words = case.pop("length"), [f"train.seed={case['seed']}"]
    names = {"epochs": "train.epochs", "num_steps": "train.steps"}
    names |= {name: f"train.{name}" for name in ("micro_batch", "micro_steps")}
    words += [f"{names[name]}={value}" for name, value in case.items() if name in names and value is not None]
    config = config_of(case["global_batch"], *words)
    expected = plain_law.steps(length, **case)
    assert fed(config, length, case["num_ranks"]) == expected
    # Whoever shares a step out, it has these samples in this order.
    alone = fed(config_of(case["global_batch"], *(w for w in words if "micro" not in w)), length, 1)
    assert [step[0][0] for step in alone] == [[row for m in step for part in m for row in part] for step in expected]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_where_samples_share_a_forward_the_micro_steps_are_those_of_one_device(num_ranks: int) -> None:
    for words, micro_steps in ((["train.micro_steps=3"], 3), ([], 1)):
        config = config_of(7, "train.steps=5", *words)
        whole = plain_law.steps(20, 0, 7, 1, num_steps=5, micro_steps=micro_steps)
        found = fed(config, 20, num_ranks, fixed=True)
        assert [[[row for part in m for row in part] for m in step] for step in found] == [
            [part for m in step for part in m] for step in whole
        ]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "words", "end"), [(0, ["train.steps=9"], 9), (3, ["train.epochs=2"], 9)])
def test_learning_rates(name: str, warmup: int, words: list[str], end: int) -> None:
    for given_end, more in ((end, []), (6, ["schedule.steps=6"])):
        shape = [f"schedule.name={name}", f"schedule.warmup={warmup}", "schedule.floor=0.1"]
        config = config_of(8, *words, *shape, *more)
        for num_ranks in (1, 2):  # 36 samples: two epochs are nine steps
            schedule = make_schedule(config, stream_of(config, Numbers(36), num_ranks, 0))
            found = [schedule.factor(step * 8, 8) for step in range(9)]
            assert found == pytest.approx([plain_law.factor(name, s, warmup, given_end, 0.1) for s in range(9)])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_evaluation_has_every_sample_once_in_its_order(num_ranks: int) -> None:
    found: list[list[int]] = []
    for rank in range(num_ranks):
        forwards = evaluation_batches(Numbers(11), batch_size=4, num_ranks=num_ranks, dp_rank=rank)
        found.append([row for m in forwards if m.weight for row in m.batch["number"].tolist()])
    assert found == [
        [
            row
            for first in range(0, 11, 4)
            for row in plain_law.cut([*range(first, min(11, first + 4))], 1, num_ranks)[0][rank]
        ]
        for rank in range(num_ranks)
    ]
    assert sorted(row for rows in found for row in rows) == list(range(11))


def test_what_a_dataset_draws_belongs_to_the_position() -> None:
    """The same on any number of ranks, another for each position, also where the sample is the same."""
    drawn: dict[int, dict[int, float]] = {}
    for num_ranks in (1, 3):
        drawn[num_ranks] = {}
        for rank in range(num_ranks):
            config = config_of(5, "train.epochs=2")
            with Loader(stream_of(config, Noisy(12), num_ranks, rank), draws=True) as loader:
                for micro in (m for step in loader for m in step.micro_steps if m.weight):
                    drawn[num_ranks] |= dict(zip(micro.positions.tolist(), micro.batch["noise"].tolist(), strict=True))
    assert drawn[1] == drawn[3] and len(set(drawn[1].values())) == 24


def test_the_law_stands_by_itself() -> None:
    tree = ast.parse(Path(plain_law.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", ())]
        )
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"itertools", "math"}
