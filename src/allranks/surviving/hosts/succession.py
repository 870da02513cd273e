"""Succession: what a host does that leads a run after another one, which may be dead, or frozen and not know of it.

1. the lease of the Run directory is this host's, also where the one that led still holds a lock on it
2. one more attempt is counted: from now on nothing is committed for an earlier one (checkpointing/commit.py)
3. what earlier attempts have begun to write goes: who has passed that check just before finds nothing to rename
4. the others learn who leads, and that the run is where it was
"""

import time

from allranks.checkpointing.checkpoint import collect_leftovers
from allranks.failure import TRANSIENT, Failure
from allranks.run import Run
from allranks.surviving.hosts.introduction import Facts, introduce
from allranks.surviving.hosts.notices import Notices


def succeed(run: Run, notices: Notices, facts: Facts) -> Failure:
    """Take the run over from the host that has introduced it; the loss of that host as the Failure of its first worker.

    Raises:
        RunError: somebody else than that host trains there, or the directory refuses.
        StoreLostError, SealError
    """
    told = notices.read("run")
    assert told is not None, "a run that nobody has introduced is nobody's to succeed in"
    run.acquire(deposed=(told["host"], told["pid"]))
    run.begin_attempt()
    collect_leftovers(run.checkpoints)
    introduce(notices, facts, run.path.resolve())
    return Failure(0, told["host"], told["pid"], time.time(), TRANSIENT, "its host led the run, and is lost")
