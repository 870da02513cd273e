"""What the kernel knows of this process's connections to other hosts: what was sent, sent again, and how long it took.

Source: struct tcp_info of linux/tcp.h; RFC 4898 says what its counters mean.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

_INFO_BYTES = 220
# Where they are in tcp_info; all of them since Linux 4.19.
_FIELDS = {
    "sent": ("Q", 200),
    "segments": ("I", 156),
    "again": ("I", 100),
    "twice": ("I", 216),
    "busy": ("Q", 168),
    "round_trip": ("I", 148),
    "rate": ("Q", 160),
}

Ends = tuple[str, int, str, int]
"""Address and port of this end and of the other."""


class Connection(NamedTuple):
    """One TCP connection to another host, since it was opened.

    Attributes:
        here, port_here, there, port_there: its ends.
        sent: bytes of data.
        segments: of data that were sent; `again`: those sent again, and `twice`: those of them that had come already.
        busy: microseconds in which something was under way and not yet confirmed.
        round_trip: microseconds, the shortest of the last five minutes: confirmations may be held back by 40 ms.
        rate: bytes a second that have come, of late, while there was enough to send.
    """

    here: str
    port_here: int
    there: str
    port_there: int
    sent: int
    segments: int
    again: int
    twice: int
    busy: int
    round_trip: int
    rate: int

    @property
    def ends(self) -> Ends:
        """What tells it from others."""
        return self[:4]


def links_file(log: Path) -> Path:
    """Where the worker with this log writes its connections."""
    return log.with_suffix(".links.json")


def write_links(path: Path) -> None:
    """Write what is known of this process's connections, whole or not at all; nothing where there are none."""
    found = list(read_connections(_own_descriptors()))
    if not found:
        return
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(path)


def take_links(path: Path) -> list[Connection]:
    """What `write_links` wrote; [] where there is nothing, or nothing that can be read. The file goes."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        path.unlink(missing_ok=True)
        return [Connection(str(here), int(a), str(there), int(b), *map(int, rest)) for here, a, there, b, *rest in told]
    except (OSError, ValueError, TypeError):
        return []


def read_connections(descriptors: Iterable[int]) -> Iterable[Connection]:
    """Those to other hosts among the open files of this process."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError, ValueError, struct.error):  # it is no connection, or is none any more
            found = _read(descriptor)
            if found is not None:
                yield found


def _own_descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


def _read(descriptor: int) -> Connection | None:
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        return None
    with socket.socket(fileno=os.dup(descriptor)) as own:  # whoever opened it may close it meanwhile
        if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        (here, port_here, *_), (there, port_there, *_) = own.getsockname(), own.getpeername()
        here, there = _plain(here), _plain(there)
        if here == there or ip_address(there).is_loopback:
            return None
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    counted = {name: struct.unpack_from(form, info, offset)[0] for name, (form, offset) in _FIELDS.items()}
    return Connection(here, port_here, there, port_there, **counted)


def _plain(address: str) -> str:
    """An IPv4 address as such, also where it comes in IPv6's clothes."""
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)
