"""The state of the rendezvous in the store: compare-and-set, sealed, and never unpickled from there."""

import base64
import pickle
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.backend import KEY, SealedBackend
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import Seal

SEAL = Seal(b"0123456789abcdef")
A, B = _NodeDesc("0 a", 1, 0), _NodeDesc("1 b", 2, 0)


@pytest.fixture
def meeting() -> MeetingStore:
    return MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)


def backend(meeting: MeetingStore, seal: Seal = SEAL) -> SealedBackend:
    return SealedBackend(meeting, seal, lambda state: None)


def with_participants(*nodes: _NodeDesc) -> bytes:
    state = _RendezvousState()
    state.participants = dict.fromkeys(nodes, 0)
    return pickle.dumps(state)


def participants(bits: bytes) -> set[_NodeDesc]:
    return set(pickle.loads(bits).participants)


def test_one_of_two_who_write_at_once_is_told_what_the_other_wrote(meeting: MeetingStore) -> None:
    one, two = backend(meeting), backend(meeting)
    assert one.get_state() is None and one.name == "allranks"
    written = one.set_state(with_participants(A))
    assert written is not None and written[2] and participants(written[0]) == {A}
    late = two.set_state(with_participants(B))
    assert late is not None and not late[2] and participants(late[0]) == {A}
    again = two.set_state(with_participants(A, B), late[1])
    assert again is not None and again[2]
    stale = one.set_state(with_participants(), written[1])
    assert stale is not None and not stale[2] and participants(stale[0]) == {A, B}
    seen = one.get_state()
    assert seen is not None and participants(seen[0]) == {A, B} and seen[1] == stale[1]


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_a_hostile_pickle_in_the_store_runs_no_code(meeting: MeetingStore, tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "proof")))
    assert (tmp_path / "proof").exists(), "the bomb is a real one"
    hostile = pickle.dumps(Bomb(tmp_path / "harm"))
    one = backend(meeting)
    one.set_state(with_participants(A))
    for text in (hostile, base64.b64encode(hostile), SEAL.close("elsewhere", "x").encode(), b""):
        meeting.store.set(KEY, text.decode("latin-1"))
        with pytest.raises(RendezvousStateError, match="not signed with this run's secret"):
            one.get_state()
        with pytest.raises(RendezvousStateError, match="not signed"):
            one.set_state(with_participants(A), "token")
    assert not (tmp_path / "harm").exists()


def test_another_secret_is_refused(meeting: MeetingStore) -> None:
    backend(meeting).set_state(with_participants(A))
    with pytest.raises(RendezvousStateError, match="not signed"):
        backend(meeting, Seal(b"another secret 16")).get_state()


def test_a_replayed_state_is_refused(meeting: MeetingStore) -> None:
    one = backend(meeting)
    first = one.set_state(with_participants(A))
    assert first is not None
    one.set_state(with_participants(A, B), first[1])
    meeting.write(KEY, first[1])
    with pytest.raises(RendezvousStateError, match="went back from version 2 to 1"):
        one.get_state()


def test_a_lost_store_is_torchs_own_error(meeting: MeetingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    one = backend(meeting)

    def lose(*_: object) -> str:
        raise StoreLostError("gone")

    monkeypatch.setattr(MeetingStore, "read", lose)
    monkeypatch.setattr(MeetingStore, "exchange", lose)
    for call in (one.get_state, lambda: one.set_state(with_participants(A))):
        with pytest.raises(RendezvousConnectionError, match="gone"):
            call()
