"""`allranks train --rendezvous etcd://`: a run that outlives the host that leads it, and an etcd that restarts."""

import time
from pathlib import Path

import pytest

from tests.cli.test_running_hosts import SETTINGS, check_ledgers, events, step_of
from tests.commands import alive, wait_for
from tests.etcd_server import etcd_server, needs_etcd
from tests.hosts import SECRET, Cluster, Host, cluster

pytestmark = [pytest.mark.distributed, needs_etcd]


def start_two(found: Cluster, *words: str) -> tuple[Host, Host]:
    """The leader on hosta, another host on hostb, some steps into the run."""
    first = found.start("hosta", *words)
    wait_for(lambda: (found.run / "lease").exists() or first.process.poll() is not None, "a leader")
    second = found.start("hostb", *words)
    wait_for(lambda: step_of(found.run) >= 7 or first.process.poll() is not None, "step 7")
    return first, second


def test_the_leader_is_killed_and_another_host_leads(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server, cluster(tmp_path, "1:2", server.port) as found:
        first, second = start_two(found, *SETTINGS)
        workers = first.family()
        began = time.monotonic()
        first.kill()
        wait_for(lambda: not any(alive(pid) for pid in workers), "workers that die with their command", 20)
        wait_for(
            lambda: len(events(found.run, "start")) == 2 or second.process.poll() is not None, "another rank 0", 100
        )
        print(f"leader lost to started again: {time.monotonic() - began:.1f} s")
        assert second.end() == 0, second.said()
        check_ledgers(found.run)
        told = [event["what"] for event in events(found.run, "verdict")]
        assert len(told) == 1 and f"on {first.name}: its host led the run, and is lost" in told[0]
        assert f"{second.name} leads from now on" in told[0]
        assert [event["host"] for event in events(found.run, "start")] == [first.name, second.name]
        assert f"{first.name} leads" in second.said()
        kept = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
        assert SECRET not in kept, "neither in a log nor in the run directory nor in etcd"
