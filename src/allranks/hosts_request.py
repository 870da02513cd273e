"""HostsRequest: how many hosts a run has, where they meet, and where the secret lies that they share."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from allranks.errors import ConfigError

Scheme = Literal["c10d", "etcd"]
FORM = "expected c10d://HOST:PORT, with a port of one of the run's hosts, or etcd://HOST:PORT[,HOST:PORT...][/NAME]"
MOST_HOSTS = 100_000
NAME = "run"  # of a meeting in etcd that the user has not named
_PLACE = r"(?:\[[0-9a-fA-F:]+\]|[^:/\[\],]+):\d+"
_ENDPOINT = re.compile(rf"(?P<scheme>[a-z0-9]+)://(?P<places>{_PLACE}(?:,{_PLACE})*)(?:/(?P<name>[A-Za-z0-9._-]*))?")
_NODES = re.compile(r"(?P<least>\d+)(:(?P<most>\d+))?")


@final
@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where hosts meet.

    Attributes:
        host, port: of one of them, which keeps the state (c10d); of an etcd, or its first member.
        scheme: which of the two.
        name: of the run in etcd, which may keep many; "" for c10d, where every run has a port of its own.
        others: hosts and ports of etcd's other members, any of which may be asked.
    """

    host: str
    port: int
    scheme: Scheme = "c10d"
    name: str = ""
    others: tuple[tuple[str, int], ...] = ()

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Hosts and ports of all members."""
        return ((self.host, self.port), *self.others)

    def __str__(self) -> str:
        place = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.places)
        return f"{self.scheme}://{place}/{self.name}" if self.name else place

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Read `c10d://HOST:PORT` or `etcd://HOST:PORT,HOST:PORT/NAME`. Raises ConfigError for anything else."""
        match = _ENDPOINT.fullmatch(text)
        if match is None:
            raise ConfigError(f"--rendezvous {text}: {FORM}")
        scheme: Scheme
        if match["scheme"] == "etcd":
            scheme, name = "etcd", match["name"] or NAME
        elif match["scheme"] == "c10d":
            scheme, name = "c10d", match["name"] or ""
        else:
            raise ConfigError(f"--rendezvous {text}: {match['scheme']}:// is unknown; {FORM}")
        if name and scheme == "c10d":
            raise ConfigError(f"--rendezvous {text}: with c10d every run has a port of its own, and no name; {FORM}")
        (host, port), *others = [_read_place(text, place) for place in match["places"].split(",")]
        if others and scheme == "c10d":
            raise ConfigError(f"--rendezvous {text}: with c10d one host keeps the state; {FORM}")
        return cls(host, port, scheme, name, tuple(others))


def _read_place(text: str, place: str) -> tuple[str, int]:
    host, _, digits = place.rpartition(":")
    if not 0 < int(digits) < 65536:
        raise ConfigError(f"--rendezvous {text}: {int(digits)} is no port; {FORM}")
    return host.strip("[]"), int(digits)


@final
@dataclass(frozen=True, slots=True)
class HostsRequest:
    """What `--nodes`, `--rendezvous` and `--secret-file` asked for; the secret itself is never part of a value.

    Attributes:
        nodes: how many hosts the run has at most, each with a command of its own.
        least: how many it needs to go on.
        endpoint: where they meet.
        secret_file: where the secret lies; None: in ALLRANKS_SECRET.
    """

    nodes: int
    least: int
    endpoint: Endpoint
    secret_file: Path | None = None

    @property
    def words(self) -> str:
        """As `--nodes` takes it."""
        return str(self.nodes) if self.least == self.nodes else f"{self.least}:{self.nodes}"


def read_hosts(nodes: str | None, rendezvous: str | None, secret_file: Path | None) -> HostsRequest | None:
    """The options of several hosts as one value; None where they ask for this host alone.

    Raises:
        ConfigError: one of them lacks another, is of another form, or asks for what is not built.
    """
    if nodes is None or (nodes == "1" and rendezvous is None):
        for name, value in (("--rendezvous", rendezvous), ("--secret-file", secret_file)):
            if value is not None:
                raise ConfigError(f"{name} {value} is for several hosts: say how many with --nodes N")
        return None
    least, most = _read_nodes(nodes)
    if rendezvous is None:
        raise ConfigError(f"--nodes {nodes} needs --rendezvous, the same on every host: {FORM}")
    return HostsRequest(most, least, Endpoint.parse(rendezvous), secret_file)


def _read_nodes(text: str) -> tuple[int, int]:
    match = _NODES.fullmatch(text)
    if match is None:
        raise ConfigError(f"--nodes {text}: expected a number of hosts N, or MIN:MAX")
    least, most = int(match["least"]), int(match["most"] or match["least"])
    if not 1 <= least <= most:
        raise ConfigError(f"--nodes {text}: expected at least 1 host, and MIN not above MAX")
    if most > MOST_HOSTS:
        raise ConfigError(f"--nodes {text}: at most {MOST_HOSTS:,} hosts; is the number right?")
    return least, most
