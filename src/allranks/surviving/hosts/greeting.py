"""The greeting: a host that comes to a store which another one serves learns which meeting is held there now.

    hellos              one number a line, each drawn by a host that came          (by that host; unsigned)
    welcome/NUMBER      the meeting's own number                                   (by the host that serves; sealed)

Who serves draws the meeting's number in its own process, and all that hosts say later is sealed with it. So what was
said in an earlier meeting with the same secret, its end above all, is nothing in this one. Who comes takes the number
only from a word under the number that it has drawn itself a moment ago, which nobody can have said before.
"""

import re
import secrets
import threading
import time
from typing import Final, final

from allranks.errors import ConfigError, ProcessError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.losses import explain_loss
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import Seal, SealError

HELLOS: Final = "hellos"
SCOPE: Final = "greeting"
POLL_SECONDS = 0.2
_NUMBER = re.compile(r"^[0-9a-f]{32}$", re.MULTILINE)


def greet(meeting: MeetingStore, secret: bytes, seconds: float) -> None:
    """Give the meeting its scope: a new one where this host serves it, else that of who does.

    Args:
        seconds: how long to wait for a welcome.

    Raises:
        ConfigError: who serves has another secret.
        ProcessError: it has said nothing, or is lost.
    """
    seal = Seal(secret, SCOPE)
    if meeting.serves:
        meeting.scope = secrets.token_hex(16)
        meeting.on_close = Greeter(meeting, seal).stop
        return
    try:
        meeting.scope = _learn(meeting, seal, time.monotonic() + seconds)
    except StoreLostError as error:
        raise explain_loss(error, meeting.endpoint) from error
    except TimeoutError as error:
        raise ProcessError(
            f"the host at {meeting.endpoint} said nothing for {seconds:g} s (guard.join_seconds)"
        ) from error
    except SealError as error:
        raise other_secret(meeting.endpoint) from error


def other_secret(endpoint: Endpoint) -> ConfigError:
    """What a host hears whose secret is not that of the others."""
    return ConfigError(
        f"what stands at {endpoint} was not signed with this host's secret: give every host of the run the "
        "same one, and every run a port of its own"
    )


def _learn(meeting: MeetingStore, seal: Seal, deadline: float) -> str:
    mine, stands = secrets.token_hex(16), ""
    while mine not in stands:  # who was faster is not written over
        stands = meeting.exchange(HELLOS, stands, f"{stands}\n{mine}")
        _check_time(deadline)
    key = f"welcome/{mine}"
    while (word := meeting.read(key)) is None:
        _check_time(deadline)
        time.sleep(POLL_SECONDS)
    return str(seal.open(key, word)["meeting"])


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


@final
class Greeter:
    """A thread that welcomes who comes, for as long as the meeting lasts."""

    def __init__(self, meeting: MeetingStore, seal: Seal) -> None:
        self._meeting, self._seal = meeting, seal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._welcome, name="allranks-greeter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Welcome nobody any more; a second time: nothing."""
        self._over.set()
        self._thread.join()

    def _welcome(self) -> None:
        welcomed = set[str]()
        while not self._over.wait(POLL_SECONDS):
            try:
                for number in _NUMBER.findall(self._meeting.read(HELLOS) or ""):
                    if number not in welcomed:
                        key = f"welcome/{number}"
                        self._meeting.write(key, self._seal.close(key, {"meeting": self._meeting.scope}))
                        welcomed.add(number)
            except StoreLostError:
                return
