"""The store opens, or says in one line why not."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from allranks.errors import ProcessError
from allranks.parallel import store as module
from allranks.parallel.store import agree_on_word, listen, open_store, serve
from allranks.process_environment import ProcessEnvironment

FIRST = ProcessEnvironment("environment", 0, 0, 2, 2, master_addr="127.0.0.1")
SECOND = replace(FIRST, rank=1, local_rank=1)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which a program listens that is no store, and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with listen("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
    return port


def refusal(environment: ProcessEnvironment, connect_seconds: float = 0.5) -> str:
    with pytest.raises(ProcessError) as caught:
        open_store(environment, connect_seconds=connect_seconds, timeout_seconds=10)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 76
    return str(caught.value)


def test_rank_0_serves_and_the_others_connect() -> None:
    port = free_port()
    found: list[bytes] = []

    def second() -> None:
        store = open_store(replace(SECOND, master_port=port), connect_seconds=20, timeout_seconds=20)
        found.append(store.get("key"))

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.3)  # the second waits for the first
    store = open_store(replace(FIRST, master_port=port), connect_seconds=20, timeout_seconds=20)
    store.set("key", "value")
    thread.join()
    assert found == [b"value"]


def test_a_restarted_rank_does_not_read_what_the_last_attempt_wrote() -> None:
    port = free_port()
    old = open_store(replace(FIRST, master_port=port), connect_seconds=20, timeout_seconds=20)
    old.set("address of rank 1", "old")
    agents = replace(SECOND, master_port=port, agent_store=True)
    assert open_store(agents, connect_seconds=20, timeout_seconds=20).check(["address of rank 1"])
    again = replace(agents, restart_count=1)
    assert not open_store(again, connect_seconds=20, timeout_seconds=20).check(["address of rank 1"])


def test_a_second_world_of_the_same_processes_reads_nothing_of_the_first() -> None:
    port = free_port()
    first, second = (replace(one, master_port=port) for one in (FIRST, SECOND))
    for number in range(3):
        served, reached = (open_store(one, connect_seconds=20, timeout_seconds=20) for one in (first, second))
        assert not reached.check(["address of rank 0"])
        served.set("address of rank 0", str(number))
        assert reached.get("address of rank 0") == str(number).encode()


def test_what_a_watchdog_left_in_the_agents_store_ends_no_later_attempt() -> None:
    """It writes past every prefix, and that of the next attempt reads there."""
    port = free_port()
    first, second = (replace(one, master_port=port) for one in (FIRST, SECOND))
    served: Any = open_store(first, connect_seconds=20, timeout_seconds=20)
    bare = served.underlying_store
    bare.set("exception_dump", "rank 0 timed out")
    bare.set("of the agent", "stays")
    open_store(second, connect_seconds=20, timeout_seconds=20)
    assert bare.check(["exception_dump"]), "another world's store is left as it is"
    open_store(replace(second, agent_store=True, restart_count=1), connect_seconds=20, timeout_seconds=20)
    assert not bare.check(["exception_dump"]) and bare.check(["of the agent"])


def agreed(served: Any, world_size: int, seconds: float = 20.0, ranks: Sequence[int] | None = None) -> list[str]:
    """The word of each rank, or what it was refused with."""
    found: dict[int, str] = {}

    def meet(rank: int) -> None:
        try:
            found[rank] = agree_on_word(served, rank, world_size, seconds)
        except ProcessError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks or range(world_size)]
    for thread in reversed(threads):
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return [found[rank] for rank in sorted(found)]


def test_processes_of_one_attempt_share_a_word_that_no_other_attempt_has() -> None:
    """Whoever came before has left asks, answers and all else there, and the next world may have other ranks."""
    served = HashStore()
    words = []
    for world_size in (3, 4, 2, 1):
        word, *others = agreed(served, world_size)
        assert others == [word] * (world_size - 1)
        words.append(word)
    assert len(set(words)) == 4
    assert agreed(served, 3, 0.3, ranks=[0, 1])[0] == "rank 2 did not come to the launcher's store within 0 s"
    (alone,) = agreed(HashStore(), 2, 0.3, ranks=[1])
    assert alone == "rank 0 did not come to the launcher's store within 0 s"


def test_restarted_ranks_of_several_nodes_read_nothing_of_the_last_attempt() -> None:
    served = serve(listen("127.0.0.1", 0), "127.0.0.1", timedelta(seconds=20))  # the launcher's
    port = served.port
    found: dict[tuple[int, int], list[bool]] = {}
    ends = [replace(one, master_port=port, agent_store=True, num_nodes=2) for one in (FIRST, SECOND)]

    def come(attempt: int, environment: ProcessEnvironment) -> None:
        store = open_store(environment, connect_seconds=20, timeout_seconds=20)
        seen = [store.check([f"address of {rank}"]) for rank in (0, 1) if rank != environment.rank]
        store.set(f"address of {environment.rank}", str(attempt))
        other = 1 - environment.rank
        found[attempt, environment.rank] = [*seen, store.get(f"address of {other}") == str(attempt).encode()]

    for attempt in (1, 2):
        module._opened.clear()  # processes that start anew
        threads = [threading.Thread(target=come, args=(attempt, one)) for one in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found.keys() == {(1, 0), (1, 1), (2, 0), (2, 1)} and all(one[-1] for one in found.values())


def test_a_port_in_use_is_named_with_the_next_move(taken: int) -> None:
    said = refusal(replace(FIRST, master_port=taken))
    assert f"127.0.0.1:{taken}" in said
    assert "in use" in said
    assert "MASTER_PORT" in said


def test_nobody_there() -> None:
    said = refusal(replace(SECOND, master_port=free_port()))
    assert "refused" in said
    assert "rank 1 cannot reach the store at 127.0.0.1:" in said
    assert "MASTER_ADDR" in said


def test_no_such_host() -> None:
    assert "no-such-host.invalid:1" in refusal(replace(SECOND, master_addr="no-such-host.invalid", master_port=1))


def test_somebody_else_there(taken: int) -> None:
    assert f"what listens on 127.0.0.1:{taken} is not rank 0's store" in refusal(replace(SECOND, master_port=taken))


def test_who_listens_on_all_addresses_is_reached_by_either_protocol() -> None:
    with listen("", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((host, port), 5).close()


def test_the_store_of_one_host_listens_there_only() -> None:
    environment = replace(FIRST, num_nodes=1, master_port=free_port())
    store = open_store(environment, connect_seconds=20, timeout_seconds=20)
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == environment.master_port
    }
    assert listening == {"127.0.0.1"}
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("name", "stands_for", "address"),
    [
        ("127.0.0.2", "127.0.0.2", "127.0.0.2"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        pytest.param("node-1", "127.0.1.1", "::", id="as Debian writes a host's own name"),
        pytest.param("service", "203.0.113.7", "::", id="an address of no interface here"),
    ],
)
def test_the_store_of_several_hosts_listens_where_they_look(
    name: str, stands_for: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, listening = socket.getaddrinfo, []

    def serve(listener: socket.socket, host: str, timeout: object) -> HashStore:
        listening.append((listener.getsockname()[0], host))
        listener.close()
        return HashStore()

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: ask(stands_for, *rest, **more))
    monkeypatch.setattr(module, "serve", serve)
    environment = replace(FIRST, num_nodes=2, master_addr=name, master_port=free_port())
    open_store(environment, connect_seconds=20, timeout_seconds=20)
    assert listening == [(address, name)]
