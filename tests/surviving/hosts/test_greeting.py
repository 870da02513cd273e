"""Which meeting is held: what was said in another one with the same secret is nothing in this one."""

from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from allranks.errors import ConfigError, ProcessError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.ending import Ending
from allranks.surviving.hosts.greeting import HELLOS, SCOPE, greet
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import Seal, SealError

SECRET = b"0123456789abcdef"


class Place:
    """A store, and the hosts that come to it."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.met: list[MeetingStore] = []

    def come(self, secret: bytes = SECRET, *, serves: bool = False, seconds: float = 30.0) -> Notices:
        """Meet there: the board as this host has it."""
        meeting = MeetingStore(self.store, Endpoint("here", 1), "here", serves=serves, call_seconds=5.0)
        self.met.append(meeting)
        greet(meeting, secret, seconds)
        return Notices(meeting, Seal(secret, meeting.scope))


@pytest.fixture
def places() -> Iterator[tuple[Place, Place]]:
    found = Place(), Place()
    yield found
    for meeting in (one for place in found for one in place.met):
        meeting.close(over=True)


def test_who_comes_learns_the_meeting_of_who_serves(places: tuple[Place, Place]) -> None:
    leader, *others = (places[0].come(serves=number == 0) for number in range(3))
    leader.end(Ending(75))
    assert [one.ending() for one in others] == [Ending(75)] * 2
    assert len({meeting.scope for meeting in places[0].met}) == 1 and places[0].met[0].scope


def test_an_end_of_an_earlier_meeting_ends_no_later_one(places: tuple[Place, Place]) -> None:
    old, new = places
    old.come(serves=True).end(Ending(0))
    old.come()
    leader = new.come(serves=True)
    for key in ("ending", HELLOS, *(f"welcome/{line}" for line in str(old.met[0].read(HELLOS)).split())):
        new.met[0].write(key, str(old.met[0].read(key)))  # a stranger has kept it
    other = new.come()
    assert new.met[1].scope == new.met[0].scope != old.met[0].scope
    for board in (leader, other):
        with pytest.raises(SealError):
            board.ending()


def test_another_secret_and_silence_are_one_line(places: tuple[Place, Place]) -> None:
    places[0].come(serves=True)
    with pytest.raises(ConfigError, match="was not signed with this host's secret"):
        places[0].come(b"another secret 16")
    with pytest.raises(ProcessError, match=r"the host at here:1 said nothing for 0\.2 s"):
        places[1].come(seconds=0.2)


def test_a_stranger_who_fills_the_list_keeps_nobody_out(places: tuple[Place, Place]) -> None:
    places[0].store.set(HELLOS, "garbage\n" + "0" * 33 + "\n\ufffd")
    leader, other = places[0].come(serves=True), places[0].come()
    leader.start_again(3)
    assert other.starts_again(3)


def test_a_lost_store_is_one_line(places: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> str:
        raise StoreLostError("reset")

    monkeypatch.setattr(MeetingStore, "exchange", lose)
    with pytest.raises(ProcessError, match="is gone"):
        places[0].come()


def test_a_word_of_a_meeting_is_no_welcome() -> None:
    sealed = Seal(SECRET).close("welcome/1", {"meeting": "x"})
    with pytest.raises(SealError):
        Seal(SECRET, SCOPE).open("welcome/1", sealed)
