"""What of a checkpoint is no tensor, looked at before anything is taken from it: a seal says who wrote it to no one."""

import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.manifest import Count, Progress, first_reason
from allranks.errors import CheckpointError
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.schedule import Schedule

_SETTING = re.compile(r"optimizer(\.[^.]+)?\.group\.\d+\.")  # also of optimizers that are not called so here
_NOT_KEPT = ("params", "lr")  # of a group: the model's, and the schedule's


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class _Stream(_Part):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    position: Progress


class _Dataset(_Part):
    """As data/resuming.py writes it; an older version has kept less."""

    num_samples: Count | None = None
    num_ranks: Annotated[int, Field(ge=1)] | None = None
    global_batch: Annotated[int, Field(ge=1)] | None = None
    shuffle: bool | None = None
    left_out: Count | None = None


class _Schedule(_Part):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name: Literal["constant", "linear", "cosine"]
    warmup_samples: Count
    total_samples: Count
    floor: Annotated[float, Field(ge=0, le=1)]


class _State(_Part):
    stream: _Stream
    dataset: _Dataset = _Dataset()
    optimizer: dict[str, Any]
    task: Any


class _Scheduled(_Part):
    schedule: _Schedule


_Model = TypeVar("_Model", bound=_Part)


def check_kept(checkpoint: Checkpoint, optimizers: Optimizers) -> Mapping[str, Any]:
    """The `state` of a checkpoint, as it is, which has all that a resume takes from it; nothing is changed.

    Of what a Task has kept itself only the Task knows what it has to be.

    Raises:
        CheckpointError: a member is missing, of another type, or out of bounds; names it.
    """
    state = checkpoint.manifest.state
    _validate(_State, checkpoint)
    numbers = state["optimizer"]
    prefixes = {f"optimizer.{which}" if which else "optimizer": it for which, it in optimizers.by_name.items()}
    wrong = [name for name in numbers if name in checkpoint.manifest.tensors]
    states = {name: value for name, value in numbers.items() if not _SETTING.match(name)}
    wrong += [name for name, value in states.items() if not isinstance(value, int | float)]
    for prefix, optimizer in prefixes.items():
        for index, group in enumerate(optimizer.param_groups):
            start = f"{prefix}.group.{index}."
            kept = {name: name.removeprefix(start) for name in numbers if name.startswith(start)}
            wrong += [n for n, key in kept.items() if key in _NOT_KEPT or not _is_alike(group.get(key), numbers[n])]
    if wrong:
        value = reprlib.repr(numbers[wrong[0]])
        raise CheckpointError(
            f"{checkpoint.path}: state.optimizer: {wrong[0]!r:.200} cannot be {value:.80}; the checkpoint is damaged"
        )
    return state


def read_schedule(checkpoint: Checkpoint) -> Schedule:
    """The schedule that it keeps.

    Raises:
        CheckpointError: it is missing, or none.
    """
    return Schedule(**_validate(_Scheduled, checkpoint).schedule.model_dump())


def _validate(model: type[_Model], checkpoint: Checkpoint) -> _Model:
    try:
        return model.model_validate(checkpoint.manifest.state)
    except ValidationError as error:
        raise CheckpointError(f"{checkpoint.path}: state.{first_reason(error)}; the checkpoint is damaged") from None


def _is_alike(present: object, kept: object) -> bool:
    """Whether a group's setting may have become `kept`; of what is not there yet, or None, nobody knows."""
    if present is None or kept is None:
        return True
    if isinstance(present, int | float):
        return isinstance(kept, int | float)
    if isinstance(present, tuple):
        if not isinstance(kept, list) or len(kept) != len(present):
            return False
        return all(_is_alike(one, other) for one, other in zip(present, kept, strict=True))
    return not isinstance(present, str | list) or isinstance(kept, type(present))
