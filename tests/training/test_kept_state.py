"""What of a checkpoint is no tensor: each member that is missing or mistyped is named, and nothing is taken."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.errors import CheckpointError
from allranks.training.kept_state import check_kept
from allranks.training.snapshot import kept_schedule
from tests.distributed.sessions import config_of
from tests.training.snapshots import contents_of, find, saver_of, unchanged
from tests.training.tasks import Curve

CONFIG = config_of("single", "train.global_batch=10", "optimizer.name=adam")
REMOVED = "<removed>"  # in place of a value

Made = tuple[Any, Any, Checkpoint]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A session after a step, what a checkpoint of it holds, and one."""
    directory = tmp_path_factory.mktemp("made")
    session, contents = contents_of(Curve(), CONFIG, 1)
    saver_of(session, contents, directory).save(1)
    return session, contents, find(directory, session)


def altered(checkpoint: Checkpoint, path: str, value: Any) -> Checkpoint:
    """The checkpoint with that value in its state."""
    state = copy.deepcopy(dict(checkpoint.manifest.state))
    *parents, last = path.split("/")
    place = state
    for key in parents:
        place = place[key]
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    return replace(checkpoint, manifest=checkpoint.manifest.model_copy(update={"state": state}))


NO_POSITIONS: tuple[Any, ...] = (REMOVED, None, True, -1, 0.0, "0", 2**62)
NO_COUNTS: tuple[Any, ...] = ("47", -1, 4.0, [])
NO_PARTS: tuple[Any, ...] = (REMOVED, None, [], "x", 3)
WRONG: list[tuple[str, Any]] = [
    *((member, value) for member in ("stream", "optimizer") for value in NO_PARTS),
    ("task", REMOVED),
    ("dataset", []),
    *(("stream/position", value) for value in NO_POSITIONS),
    ("stream/more", 1),
    *((f"dataset/{key}", value) for key in ("num_samples", "num_ranks", "left_out") for value in NO_COUNTS),
    ("dataset/global_batch", 0),
    ("dataset/shuffle", 1),
    ("optimizer/optimizer.step.0.weight", 3),  # there is a tensor of that name
    ("optimizer/optimizer.count.0.weight", "x"),
    *((f"optimizer/optimizer.group.0.{key}", value) for key, value in (("params", []), ("lr", 1.0), ("eps", "x"))),
    *(("optimizer/optimizer.group.0.betas", value) for value in (0.9, [0.9], [0.9, "x"])),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda value: str(value)[:40])
def test_a_member_that_is_missing_or_mistyped_is_named_and_nothing_is_taken(made: Made, path: str, value: Any) -> None:
    session, contents, checkpoint = made
    with unchanged(session), pytest.raises(CheckpointError) as refused:
        contents.load(altered(checkpoint, path, value))
    line = str(refused.value)
    assert line.startswith(f"{checkpoint.path}: state.{path.partition('/')[0]}") and "\n" not in line
    assert path.rpartition("/")[2] in line and line.endswith("; the checkpoint is damaged")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("dataset", REMOVED),  # of an older version
        ("dataset/num_samples", None),
        ("more", 1),
        ("optimizer/optimizer.group.0.betas", [0.5, 0.99]),
        ("optimizer/optimizer.group.0.counter", {"a": [1]}),
        ("optimizer/optimizer.count.0.weight", math.nan),
        ("optimizer/optimizer.critic.group.0.betas", [0.5, 0.99]),  # does not fit, and is no damage
    ],
)
def test_what_a_run_may_have_kept_is_taken(made: Made, path: str, value: Any) -> None:
    _, contents, checkpoint = made
    found = altered(checkpoint, path, value)
    assert check_kept(found, contents.optimizers) is found.manifest.state


SCHEDULES: list[Callable[[dict[str, Any]], Any]] = [
    lambda schedule: REMOVED,
    lambda schedule: "linear",
    lambda schedule: {},
    lambda schedule: schedule | {"name": "x"},
    lambda schedule: schedule | {"warmup_samples": "1"},
    lambda schedule: schedule | {"total_samples": -1},
    lambda schedule: schedule | {"floor": math.nan},
    lambda schedule: schedule | {"more": 1},
]


@pytest.mark.parametrize("change", SCHEDULES)
def test_a_schedule_that_is_none_is_named(made: Made, change: Callable[[dict[str, Any]], Any]) -> None:
    session, _, checkpoint = made
    assert kept_schedule(checkpoint, CONFIG.schedule) == session.schedule
    found = altered(checkpoint, "schedule", change(checkpoint.manifest.state["schedule"]))
    with pytest.raises(CheckpointError, match=r"step-00000001: state\.schedule.*; the checkpoint is damaged$"):
        kept_schedule(found, CONFIG.schedule)
