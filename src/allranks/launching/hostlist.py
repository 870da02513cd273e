"""Slurm's short form of host names, such as `node[01-03,7],login`, written out."""

import re
import shutil
import subprocess

from allranks.errors import ConfigError

SCONTROL_SECONDS = 10.0
SPAN = re.compile(r"(\d+)(?:-(\d+))?")


def first_host(hostlist: str) -> str:
    """The first host of a Slurm host list: as `scontrol` expands it, else by our own reading of the common form.

    Raises:
        ConfigError: the list is empty or has a form that we cannot read.
    """
    if "[" not in hostlist:
        return _plain(hostlist.split(",", 1)[0], hostlist)
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", hostlist]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            pass  # our own reading below needs no Slurm
        else:
            return _plain(answer.stdout.split("\n", 1)[0], hostlist)
    return expand_hosts(hostlist)[0]


def expand_hosts(hostlist: str) -> list[str]:
    """All hosts of a list like `a[1-3,05-07]b,c`; numbers keep the width of the span's first.

    Raises:
        ConfigError: the list is empty or has a form that we cannot read.
    """
    hosts = [host for item in _items(hostlist) for host in _expand(item, hostlist)]
    return [_plain(host, hostlist) for host in hosts]


def _items(hostlist: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", hostlist)  # commas outside brackets


def _expand(item: str, hostlist: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    spans, closing, tail = rest.partition("]")
    if not closing:
        raise _unreadable(hostlist)
    numbers = [number for span in spans.split(",") for number in _numbers(span, hostlist)]
    return [head + number + end for number in numbers for end in _expand(tail, hostlist)]


def _numbers(span: str, hostlist: str) -> list[str]:
    match = SPAN.fullmatch(span)
    if match is None:
        raise _unreadable(hostlist)
    first, last = match[1], match[2] or match[1]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _plain(host: str, hostlist: str) -> str:
    host = host.strip()
    if not host or any(letter in host for letter in "[], "):
        raise _unreadable(hostlist)
    return host


def _unreadable(hostlist: str) -> ConfigError:
    return ConfigError(f"the Slurm host list {hostlist!r} cannot be read; set MASTER_ADDR to the first host's name")
