"""Extra state of modules: found as torch names it, and said to be left out of checkpoints."""

from typing import Any

from torch import nn

from allranks.parallel.extra_state import extra_states
from tests.parallel.spreads import spread


class Counting(nn.Linear):
    """Keeps a number beside its tensors."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nothing is to be set")


def test_the_names_are_those_of_torch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting(2, 2), nn.Sequential(Counting(2, 2)))
    keys = {key for key in model.state_dict() if key.endswith("_extra_state")}
    assert set(extra_states(model)) == keys == {"1._extra_state", "2.0._extra_state"}
    assert set(extra_states(Counting(2, 2))) == {"_extra_state"} and not extra_states(nn.Linear(2, 2))


def test_it_is_said_at_the_start() -> None:
    (said,) = map(str, spread(lambda: nn.Sequential(Counting(2, 2), Counting(2, 2))).decisions)
    assert said.startswith("warning: the extra state of 2 module(s) of the model is not kept in checkpoints, because ")
    assert "Counting gives it by get_extra_state()" in said
