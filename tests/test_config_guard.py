"""The section guard: what may be muted."""

import pytest
from pydantic import ValidationError

from allranks.config_guard import SENTINELS, GuardConfig


def test_sentinels_are_muted_by_name() -> None:
    assert GuardConfig().muted == ()
    assert GuardConfig(mute=" linkage, steps ,").muted == ("linkage", "steps")
    assert GuardConfig(mute=",".join(SENTINELS)).muted == SENTINELS


def test_a_name_that_no_sentinel_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match=r"guard\.mute=link: no sentinel is called 'link'; there are replicas, "):
        GuardConfig(mute="link")
