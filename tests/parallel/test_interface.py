"""Which network interface the processes reach each other by."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from allranks.parallel import interface
from allranks.parallel.interface import advise_on_start, choose_for_nccl, choose_interface
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


@pytest.fixture
def nccl_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "conf"))
    return tmp_path / "conf"


def test_nccl_is_told_one_interface_where_there_is_no_question(nccl_files: Path) -> None:
    """Exactly that one: without "=", eth1 is eth10, too."""
    nccl_files.write_text("# NCCL_SOCKET_IFNAME=eth9\nNCCL_DEBUG=WARN\n")
    assert choose_for_nccl(replace(TWO_NODES, num_nodes=1, node_rank=0), "lo") == ("=lo", None)
    assert choose_for_nccl(replace(TWO_NODES, interface="eth1"), "eth1") == ("=eth1", None)


def test_nccl_chooses_between_hosts(nccl_files: Path) -> None:
    for name in ("eth0", None):
        told, decision = choose_for_nccl(TWO_NODES, name)
        assert told is None
        assert str(decision).startswith("NCCL chooses its own interfaces, because it knows InfiniBand's")


@pytest.mark.parametrize("one_host", [True, False])
def test_what_a_file_of_nccls_says_stays(nccl_files: Path, one_host: bool) -> None:
    nccl_files.write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==ens1f0\n")
    environment = replace(TWO_NODES, num_nodes=1, node_rank=0) if one_host else replace(TWO_NODES, interface="eth1")
    told, decision = choose_for_nccl(environment, "lo")
    assert told is None and decision is not None and decision.because == f"{nccl_files} names them"


def test_what_the_variable_says_stays(nccl_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    told, decision = choose_for_nccl(replace(TWO_NODES, num_nodes=1, node_rank=0), "lo")
    assert told is None
    assert str(decision) == "NCCL chooses its own interfaces: ib, because NCCL_SOCKET_IFNAME says so"


def test_nccl_reads_the_files_of_user_and_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert interface._nccl_files() == [tmp_path / ".nccl.conf", Path("/etc/nccl.conf")]
    monkeypatch.setenv("NCCL_CONF_FILE", "/x/nccl.conf")
    assert interface._nccl_files() == [Path("/x/nccl.conf"), Path("/etc/nccl.conf")]


def test_threads_that_are_not_allowed_are_no_fault_of_the_interface() -> None:
    assert "raise `ulimit -u`" in advise_on_start("Resource temporarily unavailable", "lo")
    assert advise_on_start("x", "lo") == "the interface is lo (GLOO_SOCKET_IFNAME sets another)"
    assert "of its own choice" in advise_on_start("x", None)
