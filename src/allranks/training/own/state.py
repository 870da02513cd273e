"""What an own loop's checkpoint holds besides tensors: optimizer settings, and the user's own objects with a state."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, final

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from torch.optim import Optimizer

from allranks.checkpointing.manifest import encode_state, first_reason
from allranks.errors import CheckpointError, TaskError
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones
from allranks.training.own.optimizer import group_settings, restore_group_settings

PAIRS = "__pairs__"  # stands for a dict whose keys are no strings, as MultiStepLR keeps its milestones


class _Group(BaseModel):
    """As `group_settings` gives it."""

    model_config = ConfigDict(strict=True)
    parameters: list[str]
    settings: dict[str, float | list[float]]

    @model_validator(mode="after")
    def _leaves_the_parameters(self) -> Self:
        if "params" in self.settings:
            raise ValueError("params is no setting")
        return self


class _Kept(BaseModel):
    model_config = ConfigDict(strict=True)
    groups: list[_Group] = []
    others: dict[str, Any] = {}


class Kept(Protocol):
    """What `world.resume` takes by name: torch's schedulers are such, and anything else with these two."""

    def state_dict(self) -> Any:
        """JSON values to remember; tuples come back as lists."""

    def load_state_dict(self, state: Any, /) -> object:
        """The inverse."""


@final
class OwnState:
    """A `Stateful` for `Contents`.

    Args:
        others: what `world.resume` was given by name, such as a learning rate scheduler.
        say: told what the checkpoint has otherwise than the script.
    """

    def __init__(
        self, spread: Spread, optimizer: Optimizer, others: Mapping[str, Kept], say: Callable[[str], None]
    ) -> None:
        self._spread = spread
        self._optimizer = optimizer
        self._others = dict(others)
        self._say = say
        for name, other in self._others.items():
            self._check(name, other)

    def state_dict(self) -> dict[str, Any]:
        """JSON values to remember; collective along pp."""
        groups, stages = group_settings(self._spread, self._optimizer), self._spread.stages
        if stages is not None:  # each stage has parameters of its own
            groups = [group for some in everyones(groups, stages.group, self._spread.device) for group in some]
        return {
            "groups": groups,
            "others": {name: to_json(other.state_dict()) for name, other in self._others.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse. Raises CheckpointError where it was written with other names, or is damaged."""
        try:
            _Kept.model_validate(state)
            kept = {name: from_json(other) for name, other in state.get("others", {}).items()}
        except ValidationError as error:
            raise CheckpointError(f"state.task.{first_reason(error)}; the checkpoint is damaged") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"state.task.others: {error}; the checkpoint is damaged") from None
        if set(kept) != set(self._others):
            raise CheckpointError(
                f"the checkpoint keeps {sorted(kept) or 'nothing'} besides model, optimizer and stream, but "
                f"world.resume was given {sorted(self._others) or 'nothing'}: give the same names"
            )
        for change in restore_group_settings(self._spread, self._optimizer, state.get("groups", [])):
            self._say(change)
        for name, other in self._others.items():
            other.load_state_dict(kept[name])

    def _check(self, name: str, other: object) -> None:
        if not all(callable(getattr(other, method, None)) for method in ("state_dict", "load_state_dict")):
            kind = type(other).__name__
            raise TaskError(f"world.resume({name}=...): {kind} needs state_dict() and load_state_dict(state)")
        try:
            encode_state(to_json(self._others[name].state_dict()), name)
        except CheckpointError as error:
            raise TaskError(f"world.resume({name}=...): its state_dict() cannot be kept: {error}") from None


def to_json(value: Any) -> Any:
    """`value` with string keys only."""
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {PAIRS: [[to_json(key), to_json(item)] for key, item in value.items()]}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; tuples come back as lists."""
    if isinstance(value, Mapping):
        if set(value) == {PAIRS}:
            return {from_json(key): from_json(item) for key, item in value[PAIRS]}
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value
