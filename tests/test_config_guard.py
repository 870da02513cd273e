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


def test_a_collective_waits_for_longer_than_anything_that_is_allowed_to_take_long() -> None:
    """Else NCCL's watchdog ends a rank that waits for a checkpoint."""
    assert GuardConfig().longest_wait == 1860.0
    phases = ("first_step_seconds", "compilation_seconds", "evaluation_seconds", "checkpoint_seconds", "input_seconds")
    for name in (*phases, "hang_seconds"):
        assert GuardConfig.model_validate({name: 7200.0}).longest_wait > 7200.0, name
    assert GuardConfig.model_validate(dict.fromkeys(phases, 5.0)).longest_wait == 660.0


def test_a_second_place_is_left_alone_before_that_is_a_hang() -> None:
    assert GuardConfig().elsewhere_seconds == 900.0
    for name in ("first_step_seconds", "checkpoint_seconds"):
        assert GuardConfig.model_validate({name: 60.0}).elsewhere_seconds == 30.0, name
