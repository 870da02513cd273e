"""Succession: what a host does that leads a run after another one, which may be dead, or frozen and not know of it.

1. the others learn that this host is about to hold the lease: should it be lost before it has introduced itself, who
   succeeds it may take the lease from it; and a host that leads no more does not come further than this
2. the lease of the Run directory is this host's, also where one that led still holds a lock on it
3. one more attempt is counted: from now on nothing is committed for an earlier one (checkpointing/commit.py)
4. what earlier attempts have begun to write goes: who has passed that check just before finds nothing to rename
5. rank 0's journal is another file with the same lines: what an old rank 0 still appends, nobody reads
6. the others learn who leads, and that the run is where it was
"""

import os
import socket
import time
from dataclasses import replace

from allranks.checkpointing.retention import collect_leftovers
from allranks.failure import PREEMPTED, TRANSIENT, Failure
from allranks.observing import journal
from allranks.run import Run
from allranks.surviving.hosts.introduction import Facts, introduce
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import StoreLostError


def succeed(run: Run, notices: Notices, facts: Facts) -> Failure:
    """Take the run over from the host that has introduced it.

    Returns:
        the loss of that host as the Failure of its first worker, with PREEMPTED where it has left as it was asked to.

    Raises:
        RunError: somebody trains there who never led, or the directory refuses.
        StoreLostError, SealError
    """
    told = notices.read("run")
    if told is None:
        raise StoreLostError("the meeting has ended")
    led = {(told["host"], told["pid"]), *((host, pid) for host, pid in notices.read("heirs") or ())}
    notices.post("heirs", sorted({*led, (socket.gethostname(), os.getpid())}))
    run.acquire(deposed=led)
    attempt = run.begin_attempt()
    collect_leftovers(run.checkpoints, generation=attempt)
    journal.take_over(run.journal())
    introduce(notices, facts, run.path.resolve())
    lost = Failure(0, told["host"], told["pid"], time.time(), TRANSIENT, "its host led the run, and is lost")
    if notices.read("left") != [told["host"], told["pid"]]:
        return lost
    notices.post("left", [])  # another host of that name and pid may lead one day
    return replace(lost, exit_code=PREEMPTED, message="its host led the run, and has left")
