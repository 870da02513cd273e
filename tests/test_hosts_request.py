"""What --nodes, --rendezvous and --secret-file ask for, and what is refused by name."""

from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.hosts_request import Endpoint, HostsRequest, read_hosts


def test_one_host_needs_nothing() -> None:
    assert read_hosts(None, None, None) is None
    assert read_hosts("1", None, None) is None


def test_several_hosts() -> None:
    asked = read_hosts("2", "c10d://node-1.cluster:29400", Path("secret"))
    assert asked is not None
    assert asked == HostsRequest(2, 2, Endpoint("node-1.cluster", 29400), Path("secret"))
    assert read_hosts("3:3", "c10d://[fe80::1]:5", None) == HostsRequest(3, 3, Endpoint("fe80::1", 5))
    elastic = read_hosts("1:4", "c10d://h:5", None)
    assert elastic is not None and (elastic.least, elastic.nodes, elastic.words, asked.words) == (1, 4, "1:4", "2")
    by_etcd = [Endpoint.parse(f"etcd://e:2379{name}") for name in ("", "/", "/nightly-1.b_")]
    assert by_etcd == [Endpoint("e", 2379, "etcd", name) for name in ("run", "run", "nightly-1.b_")]
    assert str(by_etcd[2]) == "etcd://e:2379/nightly-1.b_" and Endpoint.parse("c10d://e:1/") == Endpoint("e", 1)
    cluster = Endpoint.parse("etcd://e-1:2379,[fe80::1]:2380/nightly")
    assert cluster == Endpoint("e-1", 2379, "etcd", "nightly", (("fe80::1", 2380),))
    assert str(cluster) == "etcd://e-1:2379,[fe80::1]:2380/nightly"
    assert (str(Endpoint("fe80::1", 5)), str(Endpoint("a", 5))) == ("[fe80::1]:5", "a:5")


@pytest.mark.parametrize(
    ("nodes", "rendezvous", "said"),
    [
        ("2", None, "--nodes 2 needs --rendezvous, the same on every host: expected c10d://HOST:PORT"),
        (None, "c10d://a:1", "say how many with --nodes N"),
        ("0", "c10d://a:1", "at least 1"),
        ("two", "c10d://a:1", "expected a number of hosts N, or MIN:MAX"),
        ("4:1", "c10d://a:1", "MIN not above MAX"),
        ("1:100001", "c10d://a:1", "--nodes 1:100001: at most 100,000 hosts; is the number right?"),
        ("2", "etcd://a", "or etcd://HOST:PORT[,HOST:PORT...][/NAME]"),
        ("2", "etcd://a:1/a b", "or etcd://HOST:PORT[,"),
        ("2", "etcd://a:1/a/b", "or etcd://HOST:PORT[,"),
        ("2", "etcd://a:1,", "or etcd://HOST:PORT[,"),
        ("2", "etcd://a:1,b", "or etcd://HOST:PORT[,"),
        ("2", "etcd://a:1,b:0", "0 is no port"),
        ("2", "c10d://a:1,b:1", "with c10d one host keeps the state"),
        ("2", "c10d://a:1/name", "every run has a port of its own, and no name"),
        ("2", "http://a:1", "http:// is unknown"),
        ("2", "a:1", "expected c10d://HOST:PORT"),
        ("2", "c10d://a:0", "0 is no port"),
        ("2", "c10d://a:65536", "65536 is no port"),
    ],
)
def test_refusals(nodes: str | None, rendezvous: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hosts(nodes, rendezvous, None)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_secret_for_one_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="--secret-file s is for several hosts"):
        read_hosts(None, None, Path("s"))
