"""The learning rates at the top of the schedule, which are those that an optimizer was made with."""

from collections.abc import Mapping

from torch.optim import Optimizer

from allranks.errors import TaskError
from allranks.verdict import Decision

BEFORE = "initial_lr"
"""Where torch's schedulers keep the rate that they have found; they move the group's own as soon as they are made."""


def peaks_of(optimizer: Optimizer) -> list[float]:
    """The rate of each group, as it was before a scheduler moved it. Raises TaskError: a group has none."""
    found = list[float]()
    for index, group in enumerate(optimizer.param_groups):
        rate = group.get(BEFORE, group.get("lr"))
        if rate is None:
            raise TaskError(
                f"{type(optimizer).__name__} has no learning rate in group {index}, and steps are made at one: give it "
                "lr= (transformers.Adafactor with relative_step=False)"
            )
        found.append(float(rate))
    return found


def check_peaks(optimizers: Mapping[str, Optimizer]) -> tuple[Decision, ...]:
    """What is said of the rates of optimizers that the schedule is to move.

    Raises:
        TaskError: all of them are 0, and so is any part of them.
    """
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers.values()))
    if not any(rate for optimizer in optimizers.values() for rate in peaks_of(optimizer)):
        raise TaskError(
            f"optimizer() made {names} with a learning rate of 0, and schedule.* moves rates as parts of what they are "
            "there: nothing would be trained; give it the rate at the top of the schedule"
        )
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    moved = next((group for group in groups if group.get(BEFORE, group["lr"]) != group["lr"]), None)
    if moved is None:
        return ()
    what = f"the learning rate of {names} is {moved[BEFORE]:g} at the top of the schedule, and not {moved['lr']:g}"
    return (Decision(what, "a scheduler in optimizer() has moved it, and schedule.* moves it in its place"),)
