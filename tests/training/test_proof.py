"""A checkpoint that lacks something, or holds something else than the run, is found right after it was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.schedule import Schedule
from allranks.training.proof import prove, prove_what_was_due, what_is_due
from allranks.training.snapshot import Contents
from allranks.verdict import Verdict
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of
from tests.distributed.tasks import Tiny
from tests.training.snapshots import contents_of, saver_of

SETTINGS = ("train.global_batch=8", "train.ema=0.9")


def proven(directory: Path, layout: str, change: Any = None, beside: bool = False) -> Verdict | None:
    """What is found after three steps and a save; `change` meddles with (session, contents, patch) before it.

    `beside`: it is written beside the training, which makes no step meanwhile, but what is live changes.
    """
    session, contents = contents_of(Tiny(), config_of(layout, *SETTINGS, precision="float32"), 3)
    found: list[Verdict | None] = []
    saver = saver_of(session, contents, directory)
    saver.prove = lambda checkpoint, contents: found.append(prove(checkpoint, session, contents))

    def expect(contents: Contents) -> Any:
        due = what_is_due(session, contents)
        return lambda path: found.append(prove_what_was_due(path, due, session.processes))

    saver.expect = expect
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(session, contents, patch)
        if beside:
            save = saver.begin(3, lambda: None)
            with torch.no_grad():
                session.spread.tensors["6.bias"].add_(1.0)  # a later step
            save.settle()
            saver.settled(3)
        else:
            saver.save(3)
    (verdict,) = found
    return verdict


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_right_is_silent(tmp_path: Path, beside: bool) -> None:
    assert proven(tmp_path, "single", beside=beside) is None


@pytest.mark.distributed
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "dp_shard=2,sharding=optimizer"])
def test_it_is_silent_under_every_layout(pool: Pools, tmp_path: Path, layout: str, beside: bool) -> None:
    assert pool(2).run(proven, tmp_path, layout, None, beside) == [None, None]


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
LEFT_OUT: list[tuple[Any, str]] = [
    (forget_states, "optimizer.step.0.weight is not in it"),
    (forget_one_state, "optimizer.exp_avg_sq.6.bias is not in it"),
    (forget_the_average, "ema.0.weight is not in it"),
    (stand_elsewhere, "its position is {'position': 16}, and the run's {'position': 24}"),
    (begin_the_schedule_anew, "its schedule is {"),
]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *LEFT_OUT,
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


@pytest.mark.parametrize(("change", "said"), LEFT_OUT)
def test_so_it_is_of_one_that_is_written_beside_the_steps(tmp_path: Path, change: Any, said: str) -> None:
    verdict = proven(tmp_path, "single", change, beside=True)
    assert verdict is not None and verdict.kind == "checkpoint_unproven"
    assert verdict.what.startswith(f"a resume from step-00000003 would not go on as the run does: {said}"), verdict.what


def test_one_that_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    def make_unreadable(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> Any:
            raise PermissionError(13, "Permission denied", str(path))

        patch.setattr("allranks.checkpointing.checkpoint.read_manifest", refuse)

    verdict = proven(tmp_path, "single", make_unreadable, beside=True)
    assert verdict is not None and "it cannot be read: [Errno 13] Permission denied" in verdict.what


def move_the_rate_on_one(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    if session.processes.rank == 1:
        object.__setattr__(session, "schedule", Schedule("linear", 1, 2, 0.0))


@pytest.mark.distributed
def test_all_ranks_hear_of_one_that_is_written_beside_the_steps(pool: Pools, tmp_path: Path) -> None:
    for verdict in pool(2).run(proven, tmp_path, "fsdp", move_the_rate_on_one, True):
        assert verdict.kind == "checkpoint_unproven" and "its schedule is " in verdict.what


def meddle(session: Any, contents: Any, patch: pytest.MonkeyPatch) -> None:
    if session.processes.rank == 1:
        change_after_the_save(session, contents, patch)


@pytest.mark.distributed
def test_all_ranks_hear_of_it(pool: Pools, tmp_path: Path) -> None:
    for verdict in pool(2).run(proven, tmp_path, "fsdp", meddle):
        assert verdict.kind == "checkpoint_unproven" and "'model.6.bias'" in verdict.what
