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


def on_duty(muted: str) -> set[str]:
    """All that are posted in this rank of a run that asks for every one, but for one of them."""
    config = config_of("ddp", "guard.recompute_every=2", f"guard.mute={muted}")
    found = session_of(Tiny(), config).posted
    pace, _ = found.watch.say(batch_of(micro_step_of(Tiny(), [1])))
    names = {one.name for one in found.watch._sentinels} | {one.name for one in found.comparing}
    return names | ({"steps"} if pace else set()) | (set() if found.recomputing is None else {found.recomputing.name})


def all_on_duty() -> dict[str, set[str]]:
    """Who is posted, by who is muted; "": nobody."""
    return {muted: on_duty(muted) for muted in ("", *SENTINELS)}


def test_alone_there_is_less_to_find() -> None:
    assert posted("single") == (["schedule", "randomness", "samples"], ["linkage", "samples"], False)
    assert posted("single", "guard.mute=linkage,samples") == (["schedule", "randomness"], [], False)


@pytest.mark.distributed
def test_each_is_muted_by_its_name(pool: Pools) -> None:
    found = pool(2).run(all_on_duty)[0]
    # The checkpoint is proven where it is saved: who is muted there, test_comparing.py says.
    assert found[""] == set(SENTINELS) - {"checkpoint"}
    for name in SENTINELS:
        assert found[name] == found[""] - {name}, name


def test_nobody_is_posted_by_default() -> None:
    assert not Posted().comparing and not Posted().rounds.due(1)
