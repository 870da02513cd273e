"""What a training goes on from: what hosts have comes to the disk first, then what a mirror has; then the choice."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from allranks.checkpointing.peers import Hosts
from allranks.errors import CheckpointError
from allranks.training import starting_point
from allranks.training.starting_point import OPEN_MIRROR, SEE_MEMORY, find_starting_point

RUN: Any = SimpleNamespace(checkpoints=Path("checkpoints"), id="run-a")
HOSTS = Hosts(0, ((0,), (1,)))


@pytest.mark.parametrize(
    ("memory", "hosts", "mirror", "asked"),
    [
        (None, None, None, ["went on False", "find None"]),
        (Path("memory"), None, None, ["went on False", "find memory"]),
        (Path("memory"), None, "url", ["went on False", "find memory", "mirror found", "find memory"]),
        (Path("memory"), HOSTS, "url", ["hosts memory", "find None", "mirror found", "find None"]),
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

    def fetch_newer(run: Any, mirror: Any, processes: Any, nearer: Any, progress: Any) -> tuple[str, list[str]]:
        seen.append(f"mirror {nearer}")
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


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("fetched", ["", "fetched"])
def test_all_ranks_read_what_is_near_and_the_mirror_is_asked_for_newer_ones(
    monkeypatch: pytest.MonkeyPatch, damaged: bool, fetched: str
) -> None:
    """Nobody chooses again where nothing came; damage everywhere counts where the mirror has nothing either."""
    found, asked = list[str](), list[Any]()

    def find_checkpoint(*_: object) -> tuple[str, list[str]]:
        found.append("")
        if damaged and len(found) == 1:
            raise CheckpointError("no good checkpoint")
        return f"found {len(found)}", []

    def fetch_newer(run: Any, mirror: Any, processes: Any, nearer: Any, progress: Any) -> tuple[str, list[str]]:
        asked.append(nearer)
        return fetched, []

    monkeypatch.setattr(starting_point, "find_checkpoint", find_checkpoint)
    monkeypatch.setattr(starting_point, "fetch_newer", fetch_newer)
    processes, mirror = (cast(Any, SimpleNamespace(rank=1)) for _ in range(2))
    refused = pytest.raises(CheckpointError, match="no good") if damaged and not fetched else nullcontext()
    with refused:
        last: Any = find_starting_point(RUN, processes, None, None, mirror, lambda *what: None)
        assert last == (f"found {2 if fetched else 1}", [])
    assert asked == [None if damaged else "found 1"] and len(found) == (2 if fetched else 1)
