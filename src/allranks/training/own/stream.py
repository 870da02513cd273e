"""What `world.stream` returns: this rank's micro-batches, and the position among them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, final

from allranks.data.cut import cut_step
from allranks.data.loader import Loader
from allranks.data.second_pass import check_begins_anew
from allranks.data.stream import DataStream, draws
from allranks.errors import ConfigError
from allranks.training.own.ground import Ground
from allranks.training.own.loop import OwnLoop
from allranks.training.own.step import OwnStep


@final
class Stream:
    """This rank's micro-batches, on its device, in the order of law 2; one `for` goes through all of them.

    Before each one, the generators are seeded from where it stands (law 6), and the model knows whether its backward is
    the step's last. A `for` that is left by `break` may be followed by another, which goes on with the next step. The
    first one raises DataError for an iterable dataset that does not begin anew, which each of them reads.
    """

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop
        self._begins_anew = False  # whether the data has been seen to

    def __iter__(self) -> Iterator[Any]:
        if not self._begins_anew:
            check_begins_anew(self._loop.order.dataset, self._loop.order.seed)
            self._begins_anew = True
        return self._loop.batches()

    def __repr__(self) -> str:
        return f"<Stream at step {self.step} of {self.steps_total or '?'}, sample {self.position}>"

    @property
    def step(self) -> int:
        """Optimizer steps done since the first start of the run."""
        return self._loop.done

    @property
    def position(self) -> int:
        """Samples that they consumed, over the whole world."""
        return self._loop.order.position

    @property
    def steps_total(self) -> int | None:
        """Steps of the whole run; None where the dataset does not say how many samples it has."""
        return self._loop.order.steps_total

    def belongs_to(self, loop: OwnLoop) -> bool:
        """Whether it is the view of that loop."""
        return self._loop is loop


def make_loop(
    ground: Ground,
    step: OwnStep,
    dataset: Any,
    numbers: dict[str, int | None],
    *,
    collate: Callable[[list[Any]], Any],
    shuffle: bool,
    workers: int,
) -> OwnLoop:
    """The loop of a world over `dataset`; `numbers` are keys of the section `train`, None where they are left open.

    Raises:
        ConfigError, LayoutError, DataError: the numbers do not fit each other, the world or the dataset.
    """
    if numbers["epochs"] is not None and numbers["steps"] is not None:
        raise ConfigError(f"world.stream(epochs={numbers['epochs']}, steps={numbers['steps']}): name one of them")
    for name in ("epochs", "steps"):
        if (number := numbers[name]) is not None and number < 1:
            raise ConfigError(f"world.stream({name}={number}): expected at least 1")
    if numbers["epochs"] is None and numbers["steps"] is None:
        numbers["epochs"] = 1
    if numbers["seed"] is None:
        numbers["seed"] = ground.config.train.seed
    train = ground.config.train.model_copy(update=numbers)
    data = ground.config.data.model_copy(update={"workers": workers})
    mesh = ground.processes.mesh
    order = DataStream(
        dataset,
        cut=cut_step(train, mesh.layout),
        dp_rank=mesh.dp_rank,
        seed=train.seed,
        epochs=train.epochs,
        steps=train.steps,
        shuffle=shuffle,
    )
    step.links.check_stream(order, train.steps)

    def make_loader() -> Loader:
        ground.models.check_cut(None if numbers["micro_steps"] is not None else order.cut.micro_batch)
        ground.models.fit_last_step(order, ground.processes)
        pin = ground.device.type == "cuda"
        return Loader(order, collate=collate, workers=workers, draws=draws(dataset), pin=pin)

    ground.decisions.extend(make_loader().decisions)
    config = ground.config.model_copy(update={"train": train, "data": data})
    return OwnLoop(replace(ground, config=config), step, order, make_loader)
