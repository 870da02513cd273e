"""What one worker is told."""

from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec

from allranks.surviving.child import WorkerStart
from allranks.surviving.rendezvous import LocalRendezvous
from allranks.surviving.worker_start import start_of


def test_the_environment_of_torchrun_and_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    group = WorkerGroup(WorkerSpec("allranks", 2, LocalRendezvous("run"), entrypoint="x", max_restarts=4))
    place = {"group_rank": 1, "group_world_size": 2, "master_addr": "there", "master_port": 5}
    for name, value in place.items():  # torch's types say None
        setattr(group, name, value)
    fixed = WorkerStart(-1, 77, {"EXTRA": "x", "RANK": "beats"}, Path("/here"), Path("/logs"), 0, "a:b", (1,), "/beats")
    start = start_of(Worker(1, global_rank=3, world_size=4), group, 2, fixed)
    assert (start.rank, start.slot, start.num_threads, start.agent_pid) == (3, 1, 3, 77)
    assert (start.entry, start.args, start.beats, start.folder) == ("a:b", (1,), "/beats", Path("/here"))
    told = {name: start.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")}
    assert told == {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert (start.environ["MASTER_ADDR"], start.environ["MASTER_PORT"]) == ("there", "5")
    assert (start.environ["TORCHELASTIC_RESTART_COUNT"], start.environ["ALLRANKS_AGENT"]) == ("2", "77")
    assert (start.environ["EXTRA"], start.environ["RANK"]) == ("x", "beats"), "what the caller adds wins"
