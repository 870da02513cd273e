"""What a training goes on from: what hosts have comes to the disk first, then what a mirror has; then the choice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.checkpointing.peers import Hosts
from allranks.training import starting_point
from allranks.training.starting_point import OPEN_MIRROR, SEE_MEMORY, find_starting_point

RUN: Any = SimpleNamespace(checkpoints=Path("checkpoints"), id="run-a")
HOSTS = Hosts(0, ((0,), (1,)))


@pytest.mark.parametrize(
    ("memory", "hosts", "mirror", "asked"),
    [
        (None, None, None, ["went on False", "find None"]),
        (Path("memory"), None, None, ["went on False", "find memory"]),
        (Path("memory"), None, "url", ["went on False", "mirror memory", "find memory"]),
        (Path("memory"), HOSTS, "url", ["hosts memory", "mirror None", "find None"]),
        (None, HOSTS, None, ["hosts None", "find None"]),
    ],
)
def test_what_is_farther_is_brought_near_first(
    monkeypatch: pytest.MonkeyPatch, memory: Path | None, hosts: Hosts | None, mirror: Any, asked: list[str]
) -> None:
    seen, told = list[str](), list[Any]()
    processes: Any = SimpleNamespace(rank=0)  # what else takes them is replaced

    def bring_copies(memory: Path | None, run: Any, processes: Any, hosts: Hosts) -> tuple[str, list[str]]:
        seen.append(f"hosts {memory}")
        return "brought", ["not whole"]

    def fetch_newer(
        directory: Path, run: str, mirror: Any, processes: Any, memory: Path | None
    ) -> tuple[str, list[str]]:
        seen.append(f"mirror {memory}")
        return "fetched", []

    def find_checkpoint(directory: Path, run: str, processes: Any, memory: Path | None) -> tuple[str, list[str]]:
        seen.append(f"find {memory}")
        return "found", []

    def note_going_on(run: Any, *, first: bool) -> None:
        seen.append(f"went on {first}")

    for stand_in in (note_going_on, bring_copies, fetch_newer, find_checkpoint):
        monkeypatch.setattr(starting_point, stand_in.__name__, stand_in)
    found: Any = find_starting_point(RUN, processes, memory, hosts, mirror, lambda *what: told.append(what))
    assert found == ("found", []) and seen == asked
    wanted = [("brought", ["not whole"], SEE_MEMORY)] if hosts is not None else []
    assert told == wanted + ([("fetched", [], OPEN_MIRROR)] if mirror is not None else [])
