"""The validation split, measured exactly, whatever the number of ranks, and without a trace in the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import DataError, MemoryShortError
from allranks.run import Run
from allranks.training.validate import validate
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, parts_of, session_of
from tests.training.runs import start
from tests.training.tasks import Curve, Gan, Normed, Streamed, points

SMALL = ("train.global_batch=5",)


def validated(task: Any, layout: str, *overrides: str) -> tuple[dict[str, float], bool]:
    """In a worker: the metrics, and whether everything that this rank holds is as before."""
    session = session_of(task, config_of(layout, *overrides))
    before = parts_of(session)
    found = validate(session)
    after = parts_of(session)
    return found, all(torch.equal(tensor, after[name][2]) for name, (_, _, tensor) in before.items())


def expected(task: Curve) -> dict[str, float]:
    """The same by a plain forward over the whole split, on one device."""
    x, y = points(13, seed=len("validation")).tensors
    output = initial_model(task).double().eval()(x.double())
    right = (output.argmax(1) == y).sum().item()
    return {"loss": nn.functional.cross_entropy(output, y).item(), "accuracy": right / 13}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "layout", "overrides"),
    [
        (1, "single", SMALL),
        (1, "single", ("train.global_batch=40", "train.micro_batch=3")),
        (3, "ddp", SMALL),
        (3, "fsdp", ("train.global_batch=4",)),
        (3, "ddp", ("layout.local_sgd=3", *SMALL)),
        (4, "dp_replicate=2,dp_shard=2", ("layout.local_sgd=3", *SMALL)),
        (2, "ddp", ("train.global_batch=7", "train.micro_batch=2", "data.workers=1")),
    ],
)
def test_every_sample_counts_once(pool: Pools, world_size: int, layout: str, overrides: tuple[str, ...]) -> None:
    task = Curve()
    for found, unchanged in pool(world_size).run(validated, task, layout, *overrides):
        assert found == pytest.approx(expected(task), rel=1e-12) and unchanged


def test_nothing_is_measured_where_there_is_nothing() -> None:
    assert validated(Streamed(), "single", *SMALL)[0] == {}
    assert validated(Gan(), "single", *SMALL)[0] == {}


def test_statistics_and_counters_stay_as_they_were(tmp_path: Path) -> None:
    found, unchanged = validated(Normed(), "single", *SMALL)
    assert unchanged and set(found) == {"loss", "accuracy"}


class Narrow(Curve):
    """Notes how many samples each forward of its loss has; above `fits` of them there is no memory."""

    fits: int = 99
    normed: bool = False

    def model(self) -> Any:
        return (
            nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False))
            if self.normed
            else super().model()
        )

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        vars(self).setdefault("sizes", []).append(len(output))
        if len(output) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(output, batch)


@pytest.mark.parametrize(
    ("normed", "cut", "sizes"),
    [
        (False, "train.micro_steps=4", [2, 2, 2, 2, 2, 2, 1]),
        (False, "train.micro_batch=3", [3, 3, 2, 3, 2]),
        (False, "train.micro_steps=1", [8, 5]),
        (True, "train.micro_steps=4", [8, 5]),  # its statistics are those of the samples of a forward
    ],
)
def test_a_forward_has_no_more_samples_than_in_training(normed: bool, cut: str, sizes: list[int]) -> None:
    session = session_of(Narrow(normed=normed), config_of("single", "train.global_batch=8", cut))
    found: list[int] = []
    vars(session.task)["sizes"] = found
    validate(session)
    assert found == sizes


def test_memory_that_is_short_in_an_evaluation_is_said_to_be() -> None:
    session = session_of(Narrow(), config_of("single", "train.global_batch=8", "train.micro_batch=4"))
    vars(session.task)["fits"] = 3
    with pytest.raises(
        MemoryShortError, match=r"^memory ran out in an evaluation, with 4 sample\(s\) a forward"
    ) as short:
        validate(session)
    assert short.value.divisible


class Heavy(Curve):
    """Its last sample of evaluation takes more memory than there is."""

    def dataset(self, split: str) -> Any:
        data = super().dataset(split)
        return data if split == "train" else HeavySamples(data)


class HeavySamples:
    """As of a list."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] if index < 12 else bytearray(1 << 60)


def test_memory_that_the_dataset_lacks_is_no_forward_s() -> None:
    with pytest.raises(MemoryError) as short:
        validate(session_of(Heavy(), config_of("single", "train.global_batch=8")))
    assert short.value.__notes__ == ["allranks: while loading sample 12 (position 12) of HeavySamples"]


UNFIT = """
from tests.training.runs import start
from tests.training.tasks import Counted, Curve

class Once(Counted):
    def __init__(self):
        super().__init__("global", 13)
        self.rest = super().__iter__()

    def __iter__(self):
        yield from self.rest

class Unfit(Curve):
    what: str = "empty"

    def dataset(self, split):
        if split == "train":
            return super().dataset(split)
        return {"empty": list, "sharded": lambda: Counted("sharded", 13), "once": Once}[self.what]()
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("empty", "list is empty"),
        ("sharded", 'declares order="sharded"'),
        ("once", "Once cannot be read from its beginning again"),
    ],
)
def test_a_split_that_cannot_be_measured_is_told_before_the_first_step(tmp_path: Path, what: str, said: str) -> None:
    (tmp_path / "unfit.py").write_text(UNFIT)
    task, settings = f"{tmp_path / 'unfit.py'}:Unfit", ("train.steps=3", f"task.what={what}")
    with pytest.raises(DataError, match=rf'^dataset\("validation"\): .*{said}'):
        start(task, tmp_path / "run", *settings)
    assert not Run.open(tmp_path / "run").steps()
    assert start(task, tmp_path / "never", *settings, "evaluate.every=0") == 0
