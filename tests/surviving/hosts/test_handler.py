"""torch's handler as it is made here: it opens no store of its own, and knows the limits."""

import socket
from datetime import UTC, datetime

import psutil
import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    Token,
    _NodeDesc,
    _NodeDescGenerator,
    _RendezvousState,
)

from allranks.config_guard import GuardConfig
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.backend import SealedBackend
from allranks.surviving.hosts.handler import BEATS, make_handler
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.presence import SUSPECT_SECONDS
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.state import LONG_AGO, StateReader


def test_a_round_of_one_host_opens_no_port() -> None:
    before = {one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    meeting = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
    guard = GuardConfig.model_validate({"host_seconds": 4.0, "join_seconds": 30.0})
    handler = make_handler(SealedBackend(meeting, Seal(b"0" * 16), lambda state: None), 1, 1, guard)
    try:
        found = handler.next_rendezvous()
    finally:
        handler._stop_heartbeats()
    assert (found.rank, found.world_size) == (0, 1)
    after = {one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    assert after == before, "torch's own opens one on every interface"
    assert handler._this_node.addr == socket.gethostname()
    settings = handler.settings
    assert (settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt) == (4.0 / BEATS, BEATS)
    assert settings.timeout.join.total_seconds() == 30.0


def test_no_change_of_the_state_waits_for_sources_to_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchelastic's events do, for every frame on the stack, and others are faster meanwhile."""
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: pytest.fail("an event is written"))
    meeting = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
    handler = make_handler(SealedBackend(meeting, Seal(b"0" * 16), lambda state: None), 1, 1, GuardConfig())
    try:
        handler.next_rendezvous()
        handler.set_closed()
    finally:
        handler._stop_heartbeats()
    assert handler.is_closed()


def nodes_of_a_process(monkeypatch: pytest.MonkeyPatch, number: int) -> list[_NodeDesc]:
    """What it names its first handlers; all of these processes have one name and pid, as a container's first has."""
    monkeypatch.setattr(DynamicRendezvousHandler, "_node_desc_generator", _NodeDescGenerator())
    meeting = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
    backend = SealedBackend(meeting, Seal(b"0" * 16), lambda state: None)
    return [make_handler(backend, 1, 1, GuardConfig())._this_node for _ in range(number)]


def test_a_process_of_the_same_name_and_pid_is_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [*nodes_of_a_process(monkeypatch, 3), *nodes_of_a_process(monkeypatch, 3)]
    assert len({(node.addr, node.pid) for node in nodes}) == 1 and len(set(nodes)) == 6
    assert nodes[:3] == sorted(nodes[:3]), "those of one process in the order in which they were made"


def test_a_container_that_starts_again_is_not_lost_by_the_sign_of_life_at_which_the_one_before_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (before,), (after,) = nodes_of_a_process(monkeypatch, 1), nodes_of_a_process(monkeypatch, 1)
    told, reader = StateReader(lambda: 100.0).write(_RendezvousState(), 1), StateReader(lambda: 100.0)

    def last_seen(node: _NodeDesc, beat: int) -> datetime:
        listed = [node.addr, node.pid, node.local_id]
        return reader.read(told | {"beats": [[listed, beat]]}).last_heartbeats[node]

    last_seen(before, 57)
    reader.take_for_lost(before)
    assert last_seen(before, 57) == LONG_AGO
    for beat in range(1, 60):
        assert (datetime.now(UTC) - last_seen(after, beat)).total_seconds() < 60
        assert not reader.is_taken_for_lost(after)


def test_a_longer_patience_makes_signs_of_life_no_rarer() -> None:
    meeting = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
    backend = SealedBackend(meeting, Seal(b"0" * 16), lambda state: None)
    for guard in (GuardConfig(), GuardConfig(host_seconds=60.0)):
        settings = make_handler(backend, 1, 1, guard).settings
        between = settings.keep_alive_interval.total_seconds()
        assert between < SUSPECT_SECONDS / 4, "a suspect's silence is of several signs of life"
        assert abs(between * settings.keep_alive_max_attempt - guard.host_seconds) < 0.01


def test_an_end_that_others_write_over_is_written_until_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
    backend = SealedBackend(meeting, Seal(b"0" * 16), lambda state: None)
    handler, write, lost = make_handler(backend, 1, 1, GuardConfig()), backend.set_state, list[Token]()
    handler.next_rendezvous()
    handler._stop_heartbeats()

    def written_over(state: bytes, token: Token = None) -> tuple[bytes, Token, bool] | None:
        if len(lost) == 100:
            return write(state, token)
        lost.append(token)
        found = backend.get_state()
        return None if found is None else (*found, False)

    monkeypatch.setattr(backend, "set_state", written_over)
    handler.set_closed()
    assert handler.is_closed() and len(lost) == 100


@pytest.mark.parametrize(("most", "seconds"), [(2, 0.25), (100, 0.5), (1000, 1.0)])
def test_few_hosts_look_oftener_than_torch_does(monkeypatch: pytest.MonkeyPatch, most: int, seconds: float) -> None:
    meeting = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
    handler = make_handler(SealedBackend(meeting, Seal(b"0" * 16), lambda state: None), 1, most, GuardConfig())
    slept = list[float]()
    monkeypatch.setattr("allranks.surviving.hosts.handler.time.sleep", slept.append)
    dynamic_rendezvous._delay(seconds=1)  # type: ignore[attr-defined]
    dynamic_rendezvous._delay(seconds=(0, 0.3))  # type: ignore[attr-defined]
    assert slept[0] == handler._state_holder._cache_duration == seconds and 0 <= slept[1] <= 0.3  # type: ignore[attr-defined]
