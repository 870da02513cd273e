"""Who saves anew waits until the others have loaded the last save."""

import threading
import time
from pathlib import Path

import pytest

from allranks.verifying import loaded
from allranks.verifying.loaded import await_loaded, note_loaded


def test_every_rank_is_waited_for(tmp_path: Path) -> None:
    folder, told = str(tmp_path / "x"), list[str]()
    note_loaded(folder, 2, 0)
    note_loaded(folder, 3, 1)  # of another save

    def load_late() -> None:
        time.sleep(0.3)
        told.append("loaded")
        note_loaded(folder, 2, 1)

    other = threading.Thread(target=load_late)
    other.start()
    await_loaded(folder, 2, 2)
    told.append("waited")
    other.join()
    assert told == ["loaded", "waited"]


def test_a_rank_that_loads_nothing_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "LOADING_SECONDS", 0.1)
    note_loaded(str(tmp_path / "x"), 2, 0)
    began = time.monotonic()
    await_loaded(str(tmp_path / "x"), 2, 2)
    assert time.monotonic() - began >= 0.1
