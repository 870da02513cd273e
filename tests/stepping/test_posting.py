"""Who watches: all that can find something, but for those that are muted."""

from typing import Any

import pytest

from allranks.config_guard import SENTINELS
from allranks.stepping.posting import Posted
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny
from tests.stepping.batches import batch_of, micro_step_of


def posted(layout: str, *overrides: str) -> Any:
    """(who looks at each step, who compares the ranks, whether a pace is told)."""
    found = session_of(Tiny(), config_of(layout, *overrides)).posted
    pace, _ = found.watch.say(batch_of(micro_step_of(Tiny(), [1])))
    return [one.name for one in found.watch._sentinels], [one.name for one in found.comparing], bool(pace)


def test_alone_there_is_less_to_find() -> None:
    assert posted("single") == (["schedule", "randomness", "samples"], ["linkage", "samples"], False)
    assert posted("single", "guard.mute=linkage,samples") == (["schedule", "randomness"], [], False)


@pytest.mark.distributed
def test_each_is_muted_by_its_name(pool: Pools) -> None:
    steps, comparing, paced = pool(2).run(posted, "ddp")[0]
    # The checkpoint is proven where it is saved (training/sentinels.py).
    # Gradients are looked at where they are asked for (recomputing.py).
    assert {*steps, *comparing, "steps", "checkpoint", "gradients"} == set(SENTINELS) and paced
    for name in ("replicas", "randomness", "linkage"):
        fewer, others, _ = pool(2).run(posted, "ddp", f"guard.mute={name}")[0]
        assert name not in (*fewer, *others) and {*fewer, *others} == {*steps, *comparing} - {name}
    assert pool(2).run(posted, "ddp", "guard.mute=steps")[0] == (steps, comparing, False)


def test_nobody_is_posted_by_default() -> None:
    assert not Posted().comparing and not Posted().rounds.due(1)
