"""What the kernel knows of this process's connections to some addresses: what was sent, lost, and how long it took.

Read by the descriptor's number, in C: a socket object of Python's could change the mode of a socket that is another's.

Source: struct tcp_info of linux/tcp.h; RFC 4898 says what its counters mean.
"""

import contextlib
import ctypes
import functools
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

WORD = 1 << 32
"""Counters of segments begin anew there."""

_TCP_INFO, _INFO_BYTES = 11, 220
_APP_LIMITED_BYTE = 7  # its lowest bit
# Where they are in tcp_info; all of them since Linux 4.19.
_FIELDS = {
    "sent": ("Q", 200),
    "segments": ("I", 156),
    "again": ("I", 100),
    "twice": ("I", 216),
    "busy": ("Q", 168),
    "held_there": ("Q", 176),
    "held_here": ("Q", 184),
    "round_trip": ("I", 148),
    "rate": ("Q", 160),
}

Ends = tuple[str, int, str, int]
"""Address and port of this end and of the other."""


class Connection(NamedTuple):
    """One TCP connection to another host, since it was opened.

    Attributes:
        here, port_here, there, port_there: its ends.
        sent, segments: of data, with what was sent again; `again`: segments that were, and `twice`: those of them that
            had come already.
        busy: microseconds in which something was under way and not yet confirmed; `held_there`, `held_here`: those of
            them in which the receiver, or this host's own buffer, had no room.
        round_trip: microseconds, the shortest of the last five minutes: confirmations may be held back by 40 ms.
        rate: bytes a second that came, as the kernel measured it last; or, where it is `idle` (1, else 0), the most it
            measured since while the program had nothing more to send: the network might carry more.
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
    held_there: int
    held_here: int
    round_trip: int
    rate: int
    idle: int

    @property
    def ends(self) -> Ends:
        """What tells it from others."""
        return self[:4]


def read_connections(hosts: Collection[str]) -> list[Connection]:
    """This process's connections to these addresses; [] where the kernel does not tell of such things."""
    if not sys.platform.startswith("linux"):
        return []
    found = []
    for descriptor in _own_sockets():
        with contextlib.suppress(OSError, ValueError, struct.error):  # it is no connection, or is none any more
            there, port_there = _address("getpeername", descriptor)
            if there not in hosts:
                continue
            here, port_here = _address("getsockname", descriptor)
            if here != there:
                found.append(Connection(here, port_here, there, port_there, **_info(descriptor)))
    return found


def _own_sockets() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the listing's own, or is closed
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _address(which: str, descriptor: int) -> tuple[str, int]:
    """`getpeername` or `getsockname`, an IPv4 address as such, also where it comes in IPv6's clothes."""
    raw, size = ctypes.create_string_buffer(28), ctypes.c_uint32(28)
    if getattr(_libc(), which)(descriptor, raw, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), which)
    family, port = struct.unpack_from("=H", raw)[0], struct.unpack_from("!H", raw, 2)[0]
    if family == socket.AF_INET:
        return str(ip_address(raw.raw[4:8])), port
    if family != socket.AF_INET6:
        raise ValueError(family)
    parsed = ip_address(raw.raw[8:24])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed), port


def _info(descriptor: int) -> dict[str, int]:
    raw, size = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint32(_INFO_BYTES)
    if _libc().getsockopt(descriptor, socket.IPPROTO_TCP, _TCP_INFO, raw, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), "getsockopt")
    if size.value < _INFO_BYTES:
        raise ValueError("an older kernel")
    counted = {name: int(struct.unpack_from(form, raw, offset)[0]) for name, (form, offset) in _FIELDS.items()}
    return counted | {"idle": raw.raw[_APP_LIMITED_BYTE] & 1}
