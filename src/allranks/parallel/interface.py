"""Which network interface the processes of a world reach each other by."""

import ipaddress
import socket

import psutil

from allranks.process_environment import ProcessEnvironment
from allranks.verdict import Decision

ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # of documentations (RFC 5737, RFC 3849): only their routes are looked up


def choose_interface(environment: ProcessEnvironment) -> tuple[str | None, Decision]:
    """The interface for gloo and NCCL (None: the backend's own choice), and why; changes nothing."""
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
