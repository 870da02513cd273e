"""What is lost, in words: the meeting store has gone, a stranger writes there, a host is silent, hosts do not come."""

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.errors import ProcessError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.presence import SUSPECT_SECONDS, Presence
from allranks.surviving.hosts.seal import SealError
from allranks.surviving.hosts.table import host_of

LOST = (StoreLostError, RendezvousConnectionError)
FORGED = (SealError, RendezvousStateError)


def explain_loss(error: Exception, endpoint: Endpoint) -> ProcessError:
    """What ends the command of a host that has lost the store at `endpoint`."""
    if isinstance(error, FORGED):
        return ProcessError(
            f"somebody without this run's secret writes at {endpoint}: {error}; nothing of it was used: start all "
            "hosts again, where strangers cannot write"
        )
    if endpoint.scheme == "etcd":
        return ProcessError(
            f"the meeting at {endpoint} is lost to this host: {error}; the run is whole up to its newest checkpoint: "
            "start the same command here again"
        )
    return ProcessError(
        f"the host at {endpoint}, where the others meet, is gone ({error}); the run is whole up to its newest "
        "checkpoint: start the same command on every host again"
    )


def who_is_here(presence: Presence, node: _NodeDesc, most: int) -> str:
    """How many of at most so many hosts wait or take part, and which; `node`: this one."""
    here = {node, *presence.living({*presence.state.participants, *presence.state.wait_list})}
    return f"{len(here)} of {most} hosts are here ({', '.join(sorted(map(host_of, here)))})"


def explain_want(
    presence: Presence, node: _NodeDesc, most: int, short: str, endpoint: Endpoint, guard: GuardConfig
) -> str:
    """Why a host waits no longer; `short`: why the layout cannot train on the hosts that are there, or ""."""
    here = who_is_here(presence, node, most)
    late = f"the others did not come to {endpoint} within {guard.join_seconds:g} s (guard.join_seconds)"
    if short:
        return f"{here}, too few to train: {short}; {late}: start the same command on more hosts"
    return f"{here}; {late}: start the same command on every host"


def describe_silence(guard: GuardConfig, *, suspected: bool) -> str:
    """Why a host is taken for lost; `suspected`: earlier than by its silence alone."""
    if suspected:
        return (
            "its host is lost: workers have lost their connection, and it has given no sign of life for "
            f"{SUSPECT_SECONDS:g} s"
        )
    return f"its host is lost: no sign of life for {guard.host_seconds:g} s (guard.host_seconds)"
