"""Patience with a store that does not live on any of the hosts: it may be away for a while, and nobody is lost by that.

While it is away this host's clock of signs of life stands still: who could not give one is not silent.
"""

import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar, final

from allranks.surviving.hosts.etcd import EtcdError, EtcdSilentError, LeaseGoneError
from allranks.surviving.hosts.place import StoreLostError

RETRY_SECONDS = 0.2
Answer = TypeVar("Answer")
Words = ParamSpec("Words")


@final
class Patience:
    """For calls from any thread.

    Attributes:
        refused: whether it is lost because etcd refuses, and would again.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long nobody may answer."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._away_seconds = 0.0
        self._lost: str | None = None
        self.refused = False

    def call(self, function: Callable[Words, Answer], *args: Words.args, **kwargs: Words.kwargs) -> Answer:
        """What the function returns for these arguments, asked again while nobody answers.

        Raises:
            StoreLostError: nobody has answered for too long, etcd refuses, or `lose` was called; for ever after.
        """
        while self._lost is None:
            asked = time.monotonic()
            try:
                answer = function(*args, **kwargs)
            except EtcdSilentError as error:
                self._note_silence(asked, error)
            except EtcdError as error:
                self.refused = not isinstance(error, LeaseGoneError)
                self.lose(str(error))
            else:
                self._note_answer()
                return answer
            if self._lost is None:
                time.sleep(RETRY_SECONDS)
        raise StoreLostError(self._lost)

    def lose(self, why: str) -> None:
        """Nothing is asked any more; the first reason stays."""
        with self._lock:
            self._lost = self._lost or why

    def clock(self) -> float:
        """Monotonic seconds, without those in which nobody answered."""
        with self._lock:
            now = time.monotonic()
            away = 0.0 if self._away_since is None else now - self._away_since
            return now - self._away_seconds - away

    def _note_silence(self, asked: float, error: EtcdSilentError) -> None:
        with self._lock:
            is_first = self._away_since is None
            if self._away_since is None:
                self._away_since = asked
            away = time.monotonic() - self._away_since
        # One call alone may have lasted as long because this host was frozen: it is asked once more.
        if away > self._seconds and not is_first:
            self.lose(f"no answer for {self._seconds:g} s: {error}")

    def _note_answer(self) -> None:
        with self._lock:
            if self._away_since is not None:
                self._away_seconds += time.monotonic() - self._away_since
                self._away_since = None
