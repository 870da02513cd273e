"""Checkpoints of sessions in tests: what one holds, who writes it, and the newest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.config import CheckpointConfig, Config
from allranks.training.saver import Saver
from allranks.training.snapshot import Contents, find_checkpoint, schedule_state
from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, parts_of, session_of, step_through, together


def noting(calls: list[Any], what: Callable[[Any], Any], real: Any) -> Any:
    """`real`, and `what` of its first argument in `calls`."""

    def call(first: Any, *rest: Any, **named: Any) -> Any:
        calls.append(what(first))
        return real(first, *rest, **named)

    return call


def contents_of(task: Any, config: Config, steps: int) -> tuple[Any, Contents]:
    """A session that has made `steps` steps, and what a checkpoint of it holds."""
    session = session_of(task, config)
    extra = schedule_state(session.schedule, config.schedule)
    contents = Contents(session.spread, session.optimizers, session.stream, extra, task, session.outer, session.beside)
    for _ in step_through(session, steps) if steps else ():
        pass
    return session, contents


def saver_of(session: Any, contents: Contents, directory: Path, **config: Any) -> Saver:
    """The Saver of run "run" into `directory`."""
    return Saver(contents, session.processes, CheckpointConfig(**config), directory, "run", 1)


def find(directory: Path, session: Any) -> Checkpoint:
    """The newest checkpoint of run "run"."""
    checkpoint, _ = find_checkpoint(directory, "run", session.processes)
    assert checkpoint is not None
    return checkpoint


@contextmanager
def unchanged(session: Any) -> Iterator[None]:
    """Asserts that what is done in it leaves every tensor as it was."""
    before = {name: tensor.clone() for name, (_, _, tensor) in parts_of(session).items()}
    yield
    assert all(torch.equal(parts_of(session)[name][2], tensor) for name, tensor in before.items())


def saved_parts(directory: Path, task: Any, config: Config, steps: int) -> Parts:
    """In a worker: `steps` steps and a checkpoint, and what this rank holds then."""
    session, contents = contents_of(task, config, steps)
    saver_of(session, contents, directory).save(steps)
    return parts_of(session)


def loaded_parts(directory: Path, task: Any, config: Config) -> tuple[Parts, int]:
    """In a worker: what this rank holds after the restore, and the position."""
    session, contents = contents_of(task, config, 0)
    contents.load(find(directory, session))
    return parts_of(session), session.stream.position


def check_exchange(
    pool: Pools, directory: Path, task: Any, one: tuple[Config, int], other: tuple[Config, int], steps: int
) -> dict[str, torch.Tensor]:
    """What one layout (config, world size) saves after `steps` steps another loads, bit by bit: all of it, by name."""
    limit = 240.0 if max(one[1], other[1]) > 8 else 60.0  # seconds: as many processes take turns on the cores
    before = together(pool(one[1]).run(saved_parts, directory, task, one[0], steps, timeout=limit))
    ranks: list[Any] = pool(other[1]).run(loaded_parts, directory, task, other[0], timeout=limit)
    after = together([parts for parts, _ in ranks])
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [position for _, position in ranks] == [steps * one[0].train.global_batch] * other[1]
    return before


def passed_on_parts(directory: Path, task: Any, config: Config, steps: int) -> tuple[Parts, int, Parts]:
    """In a worker: what this rank holds after the restore, the position, and what it saves a step later."""
    session, contents = contents_of(task, config, 0)
    contents.load(find(directory, session))
    loaded, position = parts_of(session), session.stream.position
    list(step_through(session, 1))
    saver_of(session, contents, directory).save(steps + 1)
    return loaded, position, parts_of(session)


def check_round_trip(
    pool: Pools, directory: Path, task: Any, one: tuple[Config, int], other: tuple[Config, int], steps: int
) -> list[dict[str, torch.Tensor]]:
    """As `check_exchange`, there and back: the other layout makes a step more, saves, and the first one loads that.

    What was saved each time.
    """
    limit = 240.0 if max(one[1], other[1]) > 8 else 60.0
    there = together(pool(one[1]).run(saved_parts, directory, task, one[0], steps, timeout=limit))
    passed: list[Any] = pool(other[1]).run(passed_on_parts, directory, task, other[0], steps, timeout=limit)
    back = together([parts for *_, parts in passed])
    ended: list[Any] = pool(one[1]).run(loaded_parts, directory, task, one[0], timeout=limit)
    for saved, ranks in ((there, [each[:2] for each in passed]), (back, ended)):
        loaded = together([parts for parts, _ in ranks])
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    batch = one[0].train.global_batch
    assert [position for _, position, _ in passed] == [steps * batch] * other[1]
    assert [position for _, position in ended] == [(steps + 1) * batch] * one[1]
    assert any(not torch.equal(there[name], back[name]) for name in there), "nothing went on"
    return [there, back]
