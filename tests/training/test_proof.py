"""A checkpoint that lacks something, or holds something else than the run, is found right after it was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.schedule import Schedule
from allranks.training.proof import prove
from allranks.training.snapshot import Contents
from allranks.verdict import Verdict
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of
from tests.distributed.tasks import Tiny
from tests.training.snapshots import contents_of, saver_of

SETTINGS = ("train.global_batch=8", "train.ema=0.9")


def proven(directory: Path, layout: str, change: Any = None, *overrides: str) -> Verdict | None:
    """What is found after three steps and a save; `change` meddles with (session, contents, patch) before it."""
    session, contents = contents_of(Tiny(), config_of(layout, *SETTINGS, *overrides, precision="float32"), 3)
    found: list[Verdict | None] = []
    saver = saver_of(session, contents, directory)
    saver.prove = lambda checkpoint, contents: found.append(prove(checkpoint, session, contents))
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(session, contents, patch)
        saver.save(3)
    (verdict,) = found
    return verdict


def test_what_is_right_is_silent(tmp_path: Path) -> None:
    assert proven(tmp_path, "single") is None


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "dp_shard=2,sharding=optimizer"])
def test_it_is_silent_under_every_layout(pool: Pools, tmp_path: Path, layout: str) -> None:
    assert pool(2).run(proven, tmp_path, layout) == [None, None]


def forget_states(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Optimizers, "parts", lambda self: [])


def forget_one_state(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    right = Optimizers.parts
    patch.setattr(
        Optimizers, "parts", lambda self: [one for one in right(self) if ".exp_avg_sq.6.bias" not in one[0].name]
    )


def forget_the_average(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Contents, "parts", lambda self, stored=None: [
        one for one in RIGHT(self, stored) if not one[0].name.startswith("ema.")
    ])  # fmt: skip


def stand_elsewhere(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    right = Contents.state

    def behind(self: Contents) -> dict[str, Any]:
        return right(self) | {"stream": {"position": 16}}

    patch.setattr(Contents, "state", behind)


def begin_the_schedule_anew(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    object.__setattr__(contents, "extra", {"schedule": Schedule("linear", 1, 2, 0.0).state_dict()})


def change_after_the_save(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    """As where the save keeps references that are written later."""
    from allranks.training import saver

    right = saver.save  # type: ignore[attr-defined]

    def late(*args: Any, **named: Any) -> Checkpoint:
        found = right(*args, **named)
        with torch.no_grad():
            session.spread.tensors["6.bias"].add_(1.0)
        return found

    patch.setattr(saver, "save", late)


RIGHT = Contents.parts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forget_states, "optimizer.step.0.weight is not in it"),
        (forget_one_state, "optimizer.exp_avg_sq.6.bias is not in it"),
        (forget_the_average, "ema.0.weight is not in it"),
        (stand_elsewhere, "its position is {'position': 16}, and the run's {'position': 24}"),
        (begin_the_schedule_anew, "its schedule is {"),
        (
            change_after_the_save,
            "it does not hold what the ranks hold: 1 tensors differ from their digests: 'model.6.bias'",
        ),
    ],
)
def test_what_is_missing_or_other_is_named(tmp_path: Path, change: Any, said: str) -> None:
    verdict = proven(tmp_path, "single", change)
    assert verdict is not None and verdict.kind == "checkpoint_unproven"
    assert verdict.what.startswith(f"a resume from step-00000003 would not go on as the run does: {said}"), verdict.what


def meddle(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    if session.processes.rank == 1:
        change_after_the_save(session, contents, patch)


@pytest.mark.distributed
def test_all_ranks_hear_of_it(pool: Pools, tmp_path: Path) -> None:
    for verdict in pool(2).run(proven, tmp_path, "fsdp", meddle):
        assert verdict.kind == "checkpoint_unproven" and "'model.6.bias'" in verdict.what
