"""How a host comes to a meeting in etcd: what it waits for, what it refuses, and which meeting is held.

`allranks/NAME/session` says that: its id, and the lease that all hosts of the meeting keep alive.
"""

import contextlib
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence

from allranks.errors import ConfigError, ProcessError
from allranks.hosts_request import Endpoint
from allranks.parallel.store import wait_for_listener
from allranks.surviving.hosts.etcd import TLS_ONLY, Address, Etcd, EtcdSilentError, is_absent
from allranks.surviving.hosts.etcd_meeting import CALLS_IN_PATIENCE, EtcdMeeting, lead_seconds
from allranks.surviving.hosts.meeting import PATIENCE_SECONDS, address_of_route
from allranks.surviving.hosts.patience import Patience
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import Seal, SealError

LEAST_VERSION = (3, 4)  # the gateway's paths begin with /v3 since then


def open_etcd_meeting(
    endpoint: Endpoint, secret: bytes, *, connect_seconds: float, seconds: float, tell: Callable[[str], None]
) -> EtcdMeeting:
    """Take part in the meeting of the endpoint's name, or begin it.

    Args:
        connect_seconds: how long to wait until etcd answers.
        seconds: how long it may be away later.
        tell: is told once, after some seconds, who is waited for.

    Raises:
        ConfigError: etcd is too old, asks for a user or for TLS, or what stands under the name is not signed with this
            secret.
        ProcessError: nobody answers there, or another program does.
    """
    _wait_for_etcd(endpoint, connect_seconds, tell)
    addresses = [address for place in endpoint.places for address in _look_up(place)]
    if not addresses:
        raise ProcessError(f"{endpoint}: its name stands for no address any more")
    etcd = Etcd(addresses, max(1.0, seconds / CALLS_IN_PATIENCE))
    patience = Patience(seconds)
    try:
        _check_version(patience.call(etcd.version), endpoint)
        address = patience.call(_route_to, addresses)
        session, lease = _open_session(etcd, patience, endpoint, Seal(secret), 2 * lead_seconds(seconds))
    except StoreLostError as error:
        refusal = str(error) if patience.refused else TLS_ONLY if any(map(_speaks_tls, addresses)) else ""
        if refusal:
            raise ConfigError(
                f"the etcd at {endpoint}: {refusal}; name one that speaks plain HTTP and asks for no user"
            ) from error
        raise ProcessError(
            f"what listens at {endpoint} does not answer as etcd does: {error}; see that it is an etcd "
            f"{'.'.join(map(str, LEAST_VERSION))} or newer"
        ) from error
    return EtcdMeeting(etcd, endpoint, session, lease, address, seconds)


def _wait_for_etcd(endpoint: Endpoint, seconds: float, tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    error = _wait_for_any(endpoint, began + min(PATIENCE_SECONDS, seconds))
    if error is not None and seconds > PATIENCE_SECONDS:
        tell(
            f"nobody listens at {endpoint} yet ({error.strerror or error}): waiting up to {seconds:g} s"
            " (guard.join_seconds) for etcd"
        )
        error = _wait_for_any(endpoint, began + seconds)
    if error is not None:
        raise ProcessError(
            f"nobody listened at {endpoint} for {seconds:g} s (guard.join_seconds): {error.strerror or error};"
            " start etcd, and see that its name, port (--listen-client-urls) and firewall are right"
        )


def _wait_for_any(endpoint: Endpoint, deadline: float) -> OSError | None:
    """Wait until a member listens, or for `deadline` on the monotonic clock: then the last error."""
    turn = PATIENCE_SECONDS / len(endpoint.places)
    while True:
        for host, port in endpoint.places:
            error = wait_for_listener(host, port, min(deadline, time.monotonic() + turn))
            if error is None or time.monotonic() >= deadline:
                return error


def _look_up(place: Address) -> list[Address]:
    """Numbers, looked up once: a look-up has no limit, and none is made while the run depends on it."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
        return list(dict.fromkeys((str(one[4][0]), place[1]) for one in found))
    return []


def _route_to(addresses: Sequence[Address]) -> str:
    """The number by which others see this host; an address of etcd's own would be no place to listen at."""
    words = ""
    for address in addresses:
        try:
            return address_of_route(*address)
        except OSError as error:
            words = error.strerror or str(error)
    raise EtcdSilentError(words)


def _speaks_tls(address: Address) -> bool:
    """Whether it answers the first words of TLS: etcd closes the connection of who says anything else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, PATIENCE_SECONDS) as plain,
        context.wrap_socket(plain),
    ):
        return True
    return False


def _check_version(version: str, endpoint: Endpoint) -> None:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(f"the etcd at {endpoint} is of version {version or 'unknown'}: at least {least} is needed")


def _open_session(etcd: Etcd, patience: Patience, endpoint: Endpoint, seal: Seal, seconds: int) -> tuple[str, int]:
    """The id and the lease of the meeting that is held under the endpoint's name, from now on at the latest."""
    key = f"allranks/{endpoint.name}/session"
    while True:
        lease = patience.call(etcd.grant, seconds)
        mine = seal.close(key, {"id": secrets.token_hex(8), "lease": str(lease)})
        _, found = patience.call(etcd.put, key, mine, lease, [is_absent(key)])
        if found is None or found.text != mine:
            patience.call(etcd.revoke, lease)
        if found is None:
            continue  # it ended in this moment
        try:
            held = seal.open(key, found.text)
        except SealError as error:
            raise ConfigError(
                f"what stands at {endpoint} was not signed with this host's secret: give every host of the run the "
                "same one, and every run a name of its own: etcd://HOST:PORT/NAME"
            ) from error
        return held["id"], int(held["lease"])
