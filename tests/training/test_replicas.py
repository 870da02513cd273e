"""A run whose copies part is ended with rank, tensor and step, before anything of it is saved."""

from pathlib import Path

import pytest

from allranks.stepping.replicas import Comparison, Difference
from allranks.training.replicas import Replicas, explain
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny
from tests.training.runs import events, saved, train_outside

HOSTS = {0: "a", 1: "a", 2: "b"}


@pytest.mark.distributed
def test_a_flipped_bit_ends_the_run(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (
        "train.global_batch=10",
        "train.steps=12",
        "guard.digest_every=2",
        "checkpoint.every=2",
        "task.flip_at=12",
    )
    refusals = train_outside(pool, 3, "Flipping", *settings, run=run, layout="ddp")
    (verdict,) = events(run, "verdict")
    step = verdict["step"]
    assert verdict["kind"] == "replicas_differ" and step in (4, 6, 8, 10)
    for told in refusals:
        assert str(told).startswith(f"GuardError: after step {step} rank 2 ("), told
        assert "0.weight" in str(told) and f"resume from a checkpoint of step {step - 2} or before" in str(told)
    assert saved(run) == [step - 4, step - 2][step == 4 :], "what is not alike is not saved"


def test_when_it_is_due() -> None:
    assert not Replicas(session_of(Tiny(), config_of("single", "guard.digest_every=1"))).due(1), "one has no copy"
    assert not Replicas(session_of(Tiny(), config_of("single", "guard.digest_every=0"))).due(1)


def test_the_words() -> None:
    three = explain(Comparison((Difference("w", (0, 1, 2), (2,)), Difference("b", (0, 1, 2), (2,))), HOSTS), 200, 100)
    assert three.what.startswith(
        "after step 200 rank 2 (b) holds other values than rank 0 (a), 1 (a): w (and 1 more) is"
    )
    assert three.next.endswith("have the memory and the device of rank 2 (b) checked")
    two = explain(Comparison((Difference("w", (0, 1), ()),), HOSTS), 200, 100)
    assert "rank 0 (a), 1 (a) hold different values" in two.what and two.next.endswith(
        "the hosts of these ranks checked"
    )
