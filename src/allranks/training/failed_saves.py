"""Saves that fail while a training goes on: so many in a row it bears, because the disk may have room again at the
next one.
"""

from typing import final

from allranks.checkpointing.commit import TAKEN_OVER
from allranks.checkpointing.save import NOT_SAVED
from allranks.errors import CheckpointError
from allranks.verdict import Verdict


@final
class FailedSaves:
    """Of one training, on the disk; every rank counts the same, because all are told the same error.

    Args:
        tolerated: so many in a row (checkpoint.failures).
    """

    def __init__(self, tolerated: int) -> None:
        self._tolerated = tolerated
        self._in_a_row = 0

    def saved(self) -> None:
        """One has succeeded."""
        self._in_a_row = 0

    def bear(self, error: CheckpointError, step: int, newest: int) -> Verdict:
        """What to say of the save of `step`, after which the training goes on.

        Args:
            newest: the step of the newest checkpoint or copy, 0 where there is none.

        Raises:
            CheckpointError: it does not go on. It was one too many, or nothing that another save may not meet: an
                attempt that is not the newest one, or a checkpoint that reads back as something else.
        """
        if NOT_SAVED not in str(error) or TAKEN_OVER in str(error):
            raise error
        self._in_a_row += 1
        if self._in_a_row > self._tolerated:
            raise self._give_up(error) from error
        left = self._tolerated - self._in_a_row
        kept = f"the newest stays that of step {newest}" if newest else "there is none yet"
        evidence = (
            f"{kept}: what ends this run before the next one costs {step - newest} steps and those to come",
            f"saves that may still fail in a row: {left} (checkpoint.failures={self._tolerated})",
        )
        move = "make room, or mend what refuses to write; the next save is tried when it is due, and the last has to be"
        return Verdict("checkpoint", str(error), evidence, move)

    def _give_up(self, error: CheckpointError) -> CheckpointError:
        if not self._tolerated:
            return error
        count = f"this is failed save {self._in_a_row} in a row, {self._tolerated} are borne (checkpoint.failures)"
        return CheckpointError(f"{error}; {count}: make room, or mend what refuses to write, and resume the run")
