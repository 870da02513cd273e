"""A worker process from its first line to its last."""

import atexit
import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from allranks.failure import read_failures
from allranks.surviving.beats import SharedBeats
from allranks.surviving.child import WorkerStart, run_worker
from allranks.surviving.forkserver import main_hidden, start

pytestmark = pytest.mark.distributed


def tell(path: str) -> None:
    """Write down what a worker finds; more at its end."""
    import torch

    found: dict[str, object] = {
        name: os.environ.get(name) for name in ("RANK", "EXTRA", "OMP_NUM_THREADS", "ALLRANKS_OLD")
    }
    found |= {
        "threads": torch.get_num_threads(),
        "cwd": os.getcwd(),
        "main": getattr(sys.modules["__main__"], "__file__", ""),
    }
    Path(path).write_text(json.dumps(found))
    atexit.register(Path(path + ".end").touch)


def name_threads(path: str) -> None:
    """Write down which threads a worker has."""
    Path(path).write_text(json.dumps([one.name for one in threading.enumerate()]))


def run(
    method: str, folder: Path, entry: str, *args: str, agent_pid: int | None = None, beats: str = "", **environ: str
) -> int | None:
    told = WorkerStart(
        rank=3,
        agent_pid=agent_pid or os.getpid(),
        environ=os.environ | {"RANK": "3", "EXTRA": "x"} | environ,
        folder=folder,
        log_dir=folder,
        num_threads=2,
        entry=entry,
        args=args,
        beats=beats,
    )
    context = multiprocessing.get_context(method)
    assert isinstance(context, multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext)
    process = context.Process(target=run_worker, args=(told, None))
    with main_hidden():
        process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_finds_its_place(
    small_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("ALLRANKS_OLD", "x")
    if method == "forkserver":
        if sys.platform != "linux":
            pytest.skip("fork servers are Linux's")
        start(modules=["torch"])
        monkeypatch.delenv("ALLRANKS_OLD")
    assert run(method, tmp_path, "tests.surviving.test_child:tell", str(tmp_path / "told")) == 0
    told = json.loads((tmp_path / "told").read_text())
    assert told == {
        "RANK": "3",
        "EXTRA": "x",
        "OMP_NUM_THREADS": "2",
        "ALLRANKS_OLD": None if method == "forkserver" else "x",
        "threads": 2,
        "cwd": str(tmp_path),
        "main": told["main"],
    }
    assert "pytest" not in told["main"]  # the program's main file is not run again
    assert (tmp_path / "told.end").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel that tells of connections is Linux's")
def test_ways_to_other_hosts_are_watched_where_there_are_some(small_server: None, tmp_path: Path) -> None:
    beats = SharedBeats(1)
    hosts: dict[str, Any] = {"ALLRANKS_HOST_ADDRESSES": "10.0.0.1,10.0.0.2"}
    for environ, watched in (({}, False), (hosts, True)):
        words = ("tests.surviving.test_child:name_threads", str(tmp_path / "told"))
        assert run("spawn", tmp_path, *words, beats=beats.path, **environ) == 0
        threads = json.loads((tmp_path / "told").read_text())
        assert "allranks-heartbeat" in threads and ("allranks-links" in threads) == watched
    beats.close()


def test_an_error_ends_with_its_code_and_a_record(small_server: None, tmp_path: Path) -> None:
    assert run("spawn", tmp_path, "tests.surviving.entries:deep_in_user_code") == 1
    (failure,) = read_failures(tmp_path)
    assert failure.rank == 3
    assert "child.py" not in failure.traceback
    assert run("spawn", tmp_path, "tests.surviving.no_such_module:x") == 1
    assert "no_such_module" in read_failures(tmp_path)[0].message


def test_a_worker_whose_agent_has_gone_does_not_begin(small_server: None, tmp_path: Path) -> None:
    code = run("spawn", tmp_path, "tests.surviving.entries:never_mind", str(tmp_path), agent_pid=os.getppid())
    assert code == -9
    assert list(tmp_path.iterdir()) == []
