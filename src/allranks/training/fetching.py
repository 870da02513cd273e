"""What the mirror has that is newer than all that is nearer comes back: the first rank brings it, and all ranks show
that it comes further, however long it takes.
"""

import threading
from collections.abc import Callable
from typing import Any, final

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.mirror import Mirror
from allranks.errors import CheckpointError
from allranks.run import Run
from allranks.stepping.world import Processes

LOOK_SECONDS = 1.0


@final
class _Fetch:
    """Under way in a thread of its own, so that the first rank can tell the others how it goes."""

    def __init__(self, run: Run, mirror: Mirror, nearer: Checkpoint | None) -> None:
        self._of = run, mirror, nearer
        self._num_moves = 0
        self._error: BaseException | None = None
        self._found: tuple[str, list[str]] = "", []
        self._thread = threading.Thread(target=self._go, name="allranks-fetch", daemon=True)
        self._thread.start()

    def look(self) -> dict[str, Any]:
        """After a moment: how far it is, and what it has come to once it is over."""
        self._thread.join(LOOK_SECONDS)
        over = not self._thread.is_alive()
        if over and self._error is not None:
            raise self._error
        return {"moves": self._num_moves, "over": over, "found": self._found}

    def _go(self) -> None:
        try:
            self._found = _fetch(*self._of, self._move)
        except BaseException as error:
            self._error = error

    def _move(self) -> None:
        self._num_moves += 1


def fetch_newer(
    run: Run,
    mirror: Mirror,
    processes: Processes,
    nearer: Checkpoint | None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[str, list[str]]:
    """Bring back the mirror's newest good checkpoint where that is newer than all that is nearer; collective.

    What a later attempt has written is newer, whatever its step.

    Args:
        run: whose RUN/checkpoints all hosts share.
        nearer: the newest good one that is here, the same on every rank; None: there is none.
        progress: called on every rank whenever more of it has come.

    Returns:
        What was fetched, in a line, or ""; and what went wrong with newer ones. The same on every rank.
    """
    fetch = _Fetch(run, mirror, nearer) if processes.rank == 0 else None
    moves = 0
    while True:
        # No rank waits in one collective for all of it: that has a limit of its own.
        told = processes.share(None if fetch is None else fetch.look())
        if told["moves"] != moves:
            moves = told["moves"]
            progress()
        if told["over"]:
            fetched, wrong = told["found"]
            return fetched, wrong


def has_saved(run: Run) -> bool:
    """Whether an attempt has brought a checkpoint to the disk, as the journal tells."""
    return any(event["event"] == "checkpoint" and "tier" not in event for event in run.events())


def _fetch(run: Run, mirror: Mirror, nearer: Checkpoint | None, advanced: Callable[[], None]) -> tuple[str, list[str]]:
    wrong: list[str] = []
    known = None if nearer is None else (nearer.manifest.generation, nearer.step)
    try:
        if not mirror.is_there() and has_saved(run):
            wrong.append(
                f"{mirror.url} has no folder {run.id}, and this run has saved checkpoints: the file system there is "
                "not mounted, or the folder was deleted, or nothing has been brought there yet"
            )
        advanced()
        for mirrored in mirror.list_newest(advanced):
            if known is not None and (mirrored.generation, mirrored.step) <= known:
                break
            try:
                fetched = mirror.fetch(mirrored, run.checkpoints, run.id, advanced)
            except CheckpointError as error:
                wrong.append(str(error))
                advanced()  # to the one before it: several that stand still are no hang either
            else:
                return f"{fetched.path.name} came back from {mirror.url}", wrong
    except CheckpointError as error:
        wrong.append(str(error))
    finally:
        mirror.spares = bool(wrong)
    return "", wrong
