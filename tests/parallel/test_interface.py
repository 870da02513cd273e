"""Which network interface the processes reach each other by."""

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from allranks.parallel import interface
from allranks.parallel.interface import choose_interface
from allranks.process_environment import ProcessEnvironment

TWO_NODES = ProcessEnvironment(
    "torchrun", rank=2, local_rank=0, world_size=4, local_world_size=2, node_rank=1, num_nodes=2, master_port=5000
)
LOOPBACK = next(
    name for name, entries in psutil.net_if_addrs().items() if any(entry.address == "127.0.0.1" for entry in entries)
)


def entry(address: str) -> object:
    return SimpleNamespace(address=address)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"lo": [entry("127.0.0.1"), entry("127.0.1.1")], "eth0": [entry("10.0.0.5")], "ib0": [entry("10.1.0.5")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)

    def towards(host: str, port: int) -> str | None:
        ways = {"head-ib": "10.1.0.5", "head": "10.0.0.5", "myself": "127.0.1.1", "127.0.0.1": "127.0.0.1"}
        return ways.get(host, None if host == "nowhere" else "10.0.0.5")

    monkeypatch.setattr(interface, "_address_towards", towards)


@pytest.mark.parametrize(
    ("master", "name", "because"),
    [
        ("head-ib", "ib0", "it leads to head-ib"),
        ("head", "eth0", "it leads to head"),
        ("myself", "eth0", "it leads to myself"),  # Debian's 127.0.1.1 for the host's own name
        ("127.0.0.1", "lo", "it leads to 127.0.0.1"),  # two agents on one host
        ("nowhere", None, "no local interface leads to nowhere"),
    ],
)
def test_several_nodes_take_the_way_to_rank_0(two_cards: None, master: str, name: str | None, because: str) -> None:
    found, decision = choose_interface(replace(TWO_NODES, master_addr=master))
    assert found == name
    assert because in decision.because


def test_a_host_with_ipv6_alone_is_seen_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"myself": "127.0.1.1", "2001:db8::1": "fd77::5"}
    cards = {"lo": [entry("127.0.1.1")], "eth0": [entry("fe80::1%eth0"), entry("fd77::5")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(interface, "_address_towards", lambda host, port: ways.get(host))
    assert choose_interface(replace(TWO_NODES, master_addr="myself"))[0] == "eth0"
    ways.clear()
    assert interface.outward_address() is None


def test_one_host_takes_loopback() -> None:
    name, decision = choose_interface(replace(TWO_NODES, num_nodes=1, node_rank=0, master_addr="192.0.2.7"))
    assert name == LOOPBACK
    assert str(decision) == f"interface {LOOPBACK}, because all processes are on this host"


def test_the_users_choice_wins() -> None:
    name, decision = choose_interface(replace(TWO_NODES, num_nodes=1, node_rank=0, interface="eth7"))
    assert (name, decision.because) == ("eth7", "GLOO_SOCKET_IFNAME says so")


def test_real_addresses() -> None:
    assert choose_interface(replace(TWO_NODES, master_addr="localhost"))[0] == LOOPBACK
    assert choose_interface(replace(TWO_NODES, master_addr="no-such-host.invalid"))[0] is None
