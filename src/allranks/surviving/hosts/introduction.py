"""The first words between hosts: what they have to have alike, and where the run is that they share."""

import hashlib
import importlib.util
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from allranks.errors import ProcessError, RunError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.greeting import other_secret
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import SealError

POLL_SECONDS = 0.1

Facts = Mapping[str, str]


def facts_of(task: str, config_digest: str, nodes: str, versions: Facts) -> dict[str, str]:
    """What all hosts have to have alike.

    Args:
        task: a task's spec; the content of its file counts, also where it is a module that can be found here.
        versions: of what else they run.
    """
    place = task.partition(":")[0]
    file = Path(place) if place.endswith(".py") else _file_of(place)
    content = task
    if file is not None and file.is_file():
        content = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return {"config": config_digest, "task": content, "--nodes": nodes, **versions}


def _file_of(module: str) -> Path | None:
    """Where a module lies; None: it is not found, or lies in no file."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None or not spec.has_location or spec.origin is None else Path(spec.origin)


def introduce(notices: Notices, facts: Facts, run: Path) -> None:
    """The leader's: say where the Run directory is."""
    where = {"host": socket.gethostname(), "pid": os.getpid(), "path": str(run)}
    notices.post("run", {"facts": dict(facts), **where})


def announce_plan(notices: Notices) -> None:
    """The leader's: say that it plans the layout before there is a Run, which may run the user's whole dataset()."""
    notices.post("planning", {"host": socket.gethostname()})


def learn(
    notices: Notices,
    facts: Facts,
    endpoint: Endpoint,
    seconds: float,
    seek: Callable[[], bool],
    tell: Callable[[str], None],
) -> Path | None:
    """Where a leader has said that the Run directory is; waits up to `seconds` for that.

    For one that plans it waits as long as that leads: who is lost leads no more, or takes the meeting along.

    Args:
        seek: has this host lead where nobody does, and says whether it leads.
        tell: says to this host's user what is waited for.

    Returns:
        None: nobody has said so, and this host leads.

    Raises:
        ConfigError: the secret is another.
        RunError: code or config are other ones than the leader's.
        ProcessError: the leader has said nothing, or has ended after it began to plan.
        StoreLostError: it has gone, and not while it planned.
    """
    deadline, planner = time.monotonic() + seconds, None
    while True:
        try:
            leads = seek()
            told = notices.read("run")
            planning = notices.read("planning")
        except StoreLostError as error:
            if planner is None:
                raise
            # Perhaps for what it has said on its own screen: that no layout fits, that it may not write there.
            raise ProcessError(
                f"{planner} led, planned the layout and ended before there was a run: {error}"
            ) from error
        except SealError as error:
            raise other_secret(endpoint) from error
        if told is not None:
            break
        if leads:
            return None
        if planning is not None and planning["host"] != planner:
            planner = planning["host"]
            tell(f"{planner} leads and plans the layout, as long as the model's trace and its dataset() take: waiting")
        if planner is None and time.monotonic() > deadline:
            raise ProcessError(f"the host at {endpoint} said nothing for {seconds:g} s (guard.join_seconds)")
        time.sleep(POLL_SECONDS)
    for name, here in facts.items():
        there = told["facts"].get(name)
        if there != here:
            raise RunError(
                f"{name} is {here} on this host and {there} on {told['host']}, which leads the run at {endpoint}: "
                "give all hosts the same task, config and versions"
            )
    return Path(told["path"])
