"""Doors that open and stay closed, and worlds whose hosts see so before their backend starts."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from allranks.errors import ProcessError
from allranks.parallel import reachable as module
from allranks.parallel.reachable import Door, address_on, check_reachable, explain, find_closed, knock, open_door
from allranks.process_environment import ProcessEnvironment
from tests.free_port import free_port


def soon() -> float:
    return time.monotonic() + 0.5


@contextmanager
def stranger(answer: bytes) -> Iterator[Door]:
    """Another program on a port, which says this, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    caller, _ = listener.accept()
                except TimeoutError:
                    continue
                with caller:
                    caller.sendall(answer)
                    over.wait(0.0 if answer else 1.0)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Door("b", "127.0.0.1", listener.getsockname()[1], "0123456789abcdef")
        over.set()
        thread.join()


def test_who_knocks_hears_the_word() -> None:
    with open_door("127.0.0.1") as door:
        assert knock(door, soon()) == "" == knock(door, soon()), "as often as one likes"
        assert len(door.word) == 16
    assert "refused" in knock(door, soon()), "it is closed behind"


def test_two_doors_have_two_words() -> None:
    with open_door("127.0.0.1") as one, open_door("127.0.0.1") as other:
        assert one.word != other.word
        assert "another program answers there" in knock(replace(one, port=other.port), soon())


def test_another_program_on_the_port_is_no_host() -> None:
    with stranger(b"HTTP/1.1 400 Bad Request\r\n") as door:
        assert "another program answers there" in knock(door, soon())
    with stranger(b"") as silent:
        assert "timed out" in knock(silent, soon())


def test_a_door_that_opens_in_time_is_found() -> None:
    door = Door("b", "127.0.0.1", free_port(), "0123456789abcdef")

    def open_late() -> None:
        time.sleep(0.4)
        with socket.create_server((door.address, door.port)) as listener:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(door.word.encode())

    thread = threading.Thread(target=open_late)
    thread.start()
    assert knock(door, time.monotonic() + 20) == ""
    thread.join()


def test_all_doors_are_tried_at_the_same_time() -> None:
    closed = {node: Door("b", "127.0.0.1", free_port(), "w") for node in range(20)}
    began = time.monotonic()
    assert sorted(find_closed(closed, 1.0), key=int) == [str(node) for node in closed]
    assert time.monotonic() - began < 10, "one after the other they would take twenty seconds"
    assert find_closed({}, 1.0) == {}


def test_what_is_told() -> None:
    doors = [Door(f"host{node}", f"10.0.0.{node}", 4000 + node, "w") for node in range(4)]
    assert explain(doors, [{}, {}, {}, {}]) == ""
    told = explain(doors, [{"1": "timed out"}, {}, {"1": "timed out", "0": "Connection refused"}, {}])
    assert told.startswith(
        "3 of 12 ways between 4 hosts are closed: host0 does not reach host1 at 10.0.0.1:4001 (timed out); host2 "
        "does not reach host1 at 10.0.0.1:4001 (timed out); host2 does not reach host0 at 10.0.0.0:4000 "
        "(Connection refused); "
    )
    everybody = [{str(there): "timed out" for there in range(4) if there != here} for here in range(4)]
    assert explain(doors, everybody).count(" does not reach ") == 4 and "; and 8 more; see " in explain(
        doors, everybody
    )


def test_the_address_of_an_interface() -> None:
    assert address_on("lo") == "127.0.0.1" and address_on("nosuch0") is None


def rank(number: int, **changes: Any) -> ProcessEnvironment:
    """Two hosts with two processes each, which some scheduler has started."""
    plain = ProcessEnvironment("slurm", number, number % 2, 4, 2, number // 2, 2, "127.0.0.1", 29500)
    return replace(plain, **changes)


def all_look(store: HashStore, numbers: tuple[int, ...] = (0, 1, 2, 3), reach_seconds: float = 1.0) -> list[str]:
    """What each rank raises; "" for nothing."""

    def look(number: int) -> str:
        try:
            check_reachable(store, rank(number), "lo", arrive_seconds=1.0, reach_seconds=reach_seconds)
        except ProcessError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(look, numbers))


def test_hosts_that_reach_each_other_go_on() -> None:
    assert all_look(HashStore()) == ["", "", "", ""]


def test_every_rank_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_closed", lambda others, seconds: {"1": "timed out"} if 1 in others else {})
    told = all_look(HashStore())
    assert len(set(told)) == 1 and told[0].startswith("1 of 2 ways between 2 hosts are closed: ")


def test_who_does_not_come_is_for_the_backend_to_tell() -> None:
    assert all_look(HashStore(), (0, 1)) == ["", ""]


@pytest.mark.parametrize(
    ("changes", "interface"),
    [({"num_nodes": 1}, "lo"), ({"agent_store": True, "launcher": "torchrun"}, "lo"), ({}, None), ({}, "nosuch0")],
)
def test_nobody_looks_where_that_says_nothing(changes: dict[str, Any], interface: str | None) -> None:
    store = HashStore()
    check_reachable(store, rank(0, **changes), interface, arrive_seconds=60.0)
    assert store.num_keys() == 0
