"""Which network interface the processes of a world reach each other by."""

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

import psutil

from allranks.failure import NO_THREADS, refuses_threads
from allranks.process_environment import ProcessEnvironment
from allranks.verdict import Decision

ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # of documentations (RFC 5737, RFC 3849): only their routes are looked up
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


def choose_interface(environment: ProcessEnvironment) -> tuple[str | None, Decision]:
    """The interface for gloo (None: its own choice), and why; changes nothing."""
    if environment.interface is not None:
        return environment.interface, Decision(f"interface {environment.interface}", "GLOO_SOCKET_IFNAME says so")
    if environment.num_nodes == 1 and (name := _interface_of("127.0.0.1")):
        return name, Decision(f"interface {name}", "all processes are on this host")
    master = environment.master_addr
    address = _address_towards(master, environment.master_port or 1)
    if address is not None and _is_loopback(address) and not _says_loopback(master):
        # Debian's /etc/hosts gives the host's own name 127.0.1.1, which other hosts cannot reach
        address = outward_address()
    name = None if address is None else _interface_of(address)
    if name is None:
        return None, Decision("interface left to the backend", f"no local interface leads to {master}")
    return name, Decision(f"interface {name}", f"it leads to {master}, where rank 0 is")


def advise_on_start(reason: str, name: str | None) -> str:
    """What to look at where a backend did not start: threads that the system does not allow, or else the interface.

    Args:
        reason: the backend's words.
        name: the interface of gloo.
    """
    if refuses_threads(reason):
        return NO_THREADS
    return f"the interface is {name or 'of its own choice'} (GLOO_SOCKET_IFNAME sets another)"


def choose_for_nccl(environment: ProcessEnvironment, name: str | None) -> tuple[str | None, Decision | None]:
    """What NCCL_SOCKET_IFNAME is to be set to (None: it is left alone), and why NCCL is told something else than gloo.

    The variable wins over NCCL's files and over its own choice, which takes InfiniBand's interfaces first and several
    at a time. So it is set only where there is no question: on one host, or where the user has named an interface.

    Args:
        name: the interface of gloo.
    """
    own = "NCCL chooses its own interfaces"
    if NCCL_VARIABLE in os.environ:
        return None, Decision(f"{own}: {os.environ[NCCL_VARIABLE]}", f"{NCCL_VARIABLE} says so")
    for file in _nccl_files():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if any(line.startswith(f"{NCCL_VARIABLE}=") for line in file.read_text().splitlines()):
                return None, Decision(own, f"{file} names them")
    if name is not None and (environment.num_nodes == 1 or environment.interface is not None):
        return f"={name}", None  # with "=" that one; without, all whose names begin so
    because = f"it knows InfiniBand's, and takes several (GLOO_SOCKET_IFNAME or {NCCL_VARIABLE} names one)"
    return None, Decision(own, because)


def _nccl_files() -> list[Path]:
    """Where NCCL reads variables, as src/misc/param.cc of it finds them."""
    system = Path("/etc/nccl.conf")
    if given := os.environ.get("NCCL_CONF_FILE"):
        return [Path(given), system]
    with contextlib.suppress(RuntimeError):  # nobody knows this user's home directory
        return [Path.home() / ".nccl.conf", system]
    return [system]


def outward_address() -> str | None:
    """By which this host reaches other networks, by IPv4 where it has that; None where it reaches none."""
    return next((found for place in ELSEWHERE if (found := _address_towards(place, 9))), None)


def _address_towards(host: str, port: int) -> str | None:
    """This host's own address on the way to `host`; None where there is no way or no such host."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a datagram socket: only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interface_of(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _says_loopback(host: str) -> bool:
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"
