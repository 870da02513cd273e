"""While the first rank brings a checkpoint back, every rank shows that it comes further, and none waits in one call."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.checkpointing.mirror import Mirror, Mirrored
from allranks.errors import CheckpointError
from allranks.training import fetching
from allranks.training.fetching import fetch_newer, has_saved
from tests.checkpointing.worlds import save_alone
from tests.distributed.pool import Pools

RUN: Any = SimpleNamespace(id="run-a", events=lambda: [])


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LOOK_SECONDS", 0.05)


def alone(share: Any = lambda value: value) -> Any:
    return SimpleNamespace(rank=0, share=share)


def run_in(folder: Path) -> Any:
    return SimpleNamespace(id="run-a", events=lambda: [], checkpoints=folder)


def test_each_block_that_came_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many looks as it takes, so that no limit of a collective and none of the guard counts for all of it."""
    mirror, seen, real = Mirror(str(tmp_path / "mirror"), "run-a"), list[Any](), Mirror._get
    mirror.bring(save_alone(tmp_path / "a", 100))
    come = threading.Semaphore(0)

    def get(mirror: Mirror, source: str, target: Path, advanced: Any) -> None:
        assert come.acquire(timeout=60)
        real(mirror, source, target, advanced)

    def share(value: Any) -> Any:
        seen.append(value["moves"])
        come.release()
        return value

    monkeypatch.setattr(Mirror, "_get", get)
    progressed = list[int]()
    told = fetch_newer(run_in(tmp_path / "b"), mirror, alone(share), None, lambda: progressed.append(len(seen)))
    assert told == (f"step-00000100 came back from {mirror.url}", [])
    assert len(seen) > 3 and len(progressed) >= 3, "one for each file at least"
    assert progressed == sorted(set(progressed)), "once a look"


def test_another_rank_hears_how_it_goes() -> None:
    told = iter(
        [
            {"moves": moves, "over": moves == 3, "found": ["came back", ["one was damaged"]]}
            for moves in (0, 0, 1, 1, 2, 3)
        ]
    )
    progressed = list[int]()
    other: Any = SimpleNamespace(rank=1, share=lambda value: next(told))
    mirror: Any = None
    assert fetch_newer(RUN, mirror, other, None, lambda: progressed.append(1)) == ("came back", ["one was damaged"])
    assert len(progressed) == 3


def test_what_it_raises_is_raised_here(tmp_path: Path) -> None:
    def refuse() -> Any:
        raise KeyboardInterrupt

    mirror: Any = SimpleNamespace(is_there=refuse)
    with pytest.raises(KeyboardInterrupt):
        fetch_newer(run_in(tmp_path), mirror, alone(), None)


def test_a_mirror_that_refuses_is_told_of_and_spares_what_it_has(tmp_path: Path) -> None:
    def refuse() -> Any:
        raise CheckpointError("the line is dead")

    mirror: Any = SimpleNamespace(is_there=refuse, spares=False)
    assert fetch_newer(run_in(tmp_path), mirror, alone(), None) == ("", ["the line is dead"])
    assert mirror.spares


def test_each_that_is_refused_is_progress_too(tmp_path: Path) -> None:
    def refuse(found: Any, *_: Any) -> Any:
        raise CheckpointError(f"{found.name} stands still")

    found = [Mirrored(1, step, f"step {step}") for step in (200, 100)]
    mirror: Any = SimpleNamespace(is_there=lambda: True, list_newest=lambda *_: found, fetch=refuse, spares=False)
    progressed = list[int]()
    told = fetch_newer(run_in(tmp_path), mirror, alone(), None, lambda: progressed.append(1))
    assert told == ("", ["step 200 stands still", "step 100 stands still"]) and progressed


def test_a_long_list_is_progress_too(tmp_path: Path) -> None:
    url = str(tmp_path / "mirror")
    for step in (100, 200, 300):
        Mirror(url, "run-a").bring(save_alone(tmp_path / str(step), step))
    counted = list[int]()
    Mirror(url, "run-a").list_newest(lambda: counted.append(1))
    assert len(counted) >= 3
    Mirror(url, "run-a").prune(1, advanced=lambda: counted.append(1))
    assert len(counted) >= 8, "three that are listed, and two that are taken away"


@pytest.mark.distributed
def test_two_ranks_come_further_together(pool: Pools, tmp_path: Path) -> None:
    url = str(tmp_path / "mirror")
    Mirror(url, "run-a").bring(save_alone(tmp_path / "a", 100))

    def case(folder: str) -> tuple[str, bool]:
        import torch
        import torch.distributed as dist

        from allranks.stepping import world

        processes: Any = SimpleNamespace(
            rank=dist.get_rank(), share=lambda value: world.share(value, torch.device("cpu"))
        )
        progressed = list[int]()
        mirror = Mirror(url, "run-a")
        told, wrong = fetch_newer(run_in(Path(folder)), mirror, processes, None, lambda: progressed.append(1))
        assert not wrong
        return told, bool(progressed)

    assert pool(2).run(case, str(tmp_path / "b")) == [(f"step-00000100 came back from {url}", True)] * 2


def test_a_run_has_saved_where_its_journal_says_so_of_the_disk() -> None:
    saved: Any = SimpleNamespace(events=lambda: [{"event": "step"}, {"event": "checkpoint", "step": 2}])
    copied: Any = SimpleNamespace(events=lambda: [{"event": "checkpoint", "step": 2, "tier": "memory"}])
    assert has_saved(saved) and not has_saved(copied) and not has_saved(RUN)
