"""Whether a save, as long as saves take here, fits into what is left after a request to stop."""

from typing import final

from allranks.units import format_seconds
from allranks.verdict import Verdict


@final
class Grace:
    """Tells once that it does not.

    Args:
        seconds: from a request to stop to the kill (guard.stop_seconds).
        beside: whether checkpoints are written beside the steps, so that the last one may have to wait for another.
        in_memory: whether the memory of this host has copies between the checkpoints.
    """

    def __init__(self, seconds: float, *, beside: bool, in_memory: bool) -> None:
        self._seconds = seconds
        self._beside, self._in_memory = beside, in_memory
        self._told = False

    def judge(self, took: float, step: float) -> Verdict | None:
        """What to say after a save; None: all is well, or it was said.

        Args:
            took: how long that save has taken, in seconds.
            step: how long steps take, which the request has to wait for; seconds.
        """
        saving = took * (2 if self._beside else 1)
        if self._told or saving + step <= self._seconds:
            return None
        self._told = True
        says = f"a last checkpoint takes {format_seconds(saving)} here, after a step of up to {format_seconds(step)}"
        what = (
            f"{says}: more than the {self._seconds:g} s after which workers that were asked to stop are killed "
            "(guard.stop_seconds)"
        )
        lost = "such a stop would cut the save off and leave the checkpoint before it, with the steps since then undone"
        memory = "" if self._in_memory else "take copies in memory (checkpoint.memory_every), "
        move = (
            f"have the scheduler warn earlier and say guard.stop_seconds={_rounded(saving + step)} or more, or "
            f"train.max_seconds; or {memory}save fewer bytes a process (layout=fsdp, more processes), on a faster disk"
        )
        return Verdict("checkpoint", what, (lost,), move)


def _rounded(seconds: float) -> int:
    """With a tenth for a disk that is slower that day."""
    return int(1.1 * seconds) + 1
