"""The stream of an own loop: lengths, cuts and what is refused before anything runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import allranks
from allranks.errors import ConfigError, DataError, LayoutError
from tests.training.own.cases import Net, Samples, count, loss_of, sgd


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"global_batch": 10}, 4),
        ({"global_batch": 10, "epochs": 3}, 12),
        ({"global_batch": 10, "steps": 9}, 9),
        ({"global_batch": 37}, 1),
    ],
)
def test_how_long_it_is(arguments: dict[str, Any], steps: int) -> None:
    with allranks.join() as world:
        stream = world.stream(Samples(), **arguments)
        assert (stream.step, stream.position, stream.steps_total) == (0, 0, steps)
        assert repr(stream) == f"<Stream at step 0 of {steps}, sample 0>"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"global_batch": 10, "epochs": 1, "steps": 2}, ConfigError, r"epochs=1, steps=2\): name one of them"),
        ({"global_batch": 10, "epochs": 0}, ConfigError, r"epochs=0\): expected at least 1"),
        ({"global_batch": 10, "steps": -1}, ConfigError, r"steps=-1\): expected at least 1"),
        ({"global_batch": 0}, ConfigError, "global_batch=0"),
        ({"global_batch": 38}, DataError, "37 samples, fewer than"),
        ({"global_batch": 3, "micro_steps": 4}, ConfigError, r"micro_steps\(4\) > "),
    ],
)
def test_what_is_refused_at_once(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with allranks.join() as world:
        with pytest.raises(error, match=text):
            world.stream(Samples(), **arguments)
        world.stream(Samples(), global_batch=10)  # a refused one is none


class Source(torch.utils.data.IterableDataset[Any]):
    """16 samples, out of one generator for all passes where it is `once`."""

    order = "global"

    def __init__(self, once: bool) -> None:
        self.rest = self.read() if once else None

    def read(self) -> Iterator[Any]:
        samples = Samples()
        return (samples[number] for number in range(16))

    def __iter__(self) -> Iterator[Any]:
        yield from self.read() if self.rest is None else self.rest


def test_a_loop_that_is_left_loses_nothing_of_its_data(tmp_path: Path) -> None:
    """Another `for` reads again up to where it stands: what can be read once is refused by the first one."""

    def fed(world: Any, source: Source) -> list[int]:
        model = world.parallelize(Net())
        optimizer = world.optimizer(model, sgd)
        stream, seen = world.stream(source, global_batch=4), list[int]()
        for _ in range(2):
            for batch in stream:
                seen += batch["index"].tolist()
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)
                if stream.step == 2:
                    break
        return seen

    with allranks.join(precision="float64", run=str(tmp_path / "anew")) as world:
        assert fed(world, Source(once=False)) == list(range(16))
    with (
        allranks.join(precision="float64", run=str(tmp_path / "once")) as world,
        pytest.raises(DataError, match="Source cannot be read"),
    ):
        fed(world, Source(once=True))


def test_more_ranks_than_samples_in_a_step(pool: Any) -> None:
    def case() -> None:
        with allranks.join() as world:
            world.stream(Samples(), global_batch=2)

    with pytest.raises(LayoutError, match=r"global_batch\(2\) < dp_replicate \* dp_shard\(3\)"):
        pool(3).run(case)
