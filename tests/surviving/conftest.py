"""What tests of this room share: a fork server that imports little, so that a test costs a tenth of a second, a run."""

from collections.abc import Iterator
from multiprocessing import forkserver as standard
from pathlib import Path

import pytest

from allranks.config import Config
from allranks.run import Run
from allranks.surviving import forkserver

LITTLE = ("allranks.surviving.child", "tests.surviving.entries")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose first attempt has begun."""
    made = Run.create(tmp_path, "task", Config(), {}, directory=tmp_path / "run")
    made.begin_attempt()
    return made


@pytest.fixture
def small_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork servers of this test import neither torch nor anything large, and end with it."""
    stop_server()
    monkeypatch.setattr(forkserver, "ALWAYS", LITTLE)
    yield
    stop_server()


def stop_server() -> None:
    """End the fork server of this process, if there is one."""
    standard._forkserver._stop()  # type: ignore[attr-defined]
    forkserver._server.has = None
