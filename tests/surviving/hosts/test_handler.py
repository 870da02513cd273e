"""torch's handler as it is made here: it opens no store of its own, and knows the limits."""

import socket

import psutil
import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

from allranks.config_guard import GuardConfig
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.backend import SealedBackend
from allranks.surviving.hosts.handler import BEATS, make_handler
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.presence import SUSPECT_SECONDS
from allranks.surviving.hosts.seal import Seal


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
