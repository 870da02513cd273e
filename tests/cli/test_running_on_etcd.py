"""`allranks train --rendezvous etcd://`: a run that outlives the host that leads it, and an etcd that restarts."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.run import Run
from tests.cli.test_running_hosts import SETTINGS, check_as_on_one_host, check_ledgers, events, step_of
from tests.commands import alive, seconds_of_restarts, wait_for
from tests.etcd_server import etcd_server, needs_etcd
from tests.hosts import SECRET, Cluster, Host, cluster

LONG = ("train.steps=5000", "checkpoint.every=5", "task.pause=0.1")
pytestmark = [pytest.mark.distributed, needs_etcd]


def start_two(found: Cluster, *words: str) -> tuple[Host, Host]:
    """The leader on hosta, another host on hostb, some steps into what they do together."""
    first = found.start("hosta", *words)
    wait_for(lambda: (found.run / "lease").exists() or first.process.poll() is not None, "a leader")
    second = found.start("hostb", *words)
    wait_for(lambda: 2 in worlds(found.run) or first.process.poll() is not None, "an attempt on both")
    go_on(found.run, first)
    return first, second


def worlds(run: Path) -> list[int]:
    """How many workers each attempt had."""
    return [event["world_size"] for event in events(run, "start")] if (run / "run.json").exists() else []


def kinds(run: Path) -> list[str]:
    """What was told in the journal."""
    return [event["kind"] for event in events(run, "verdict")]


def go_on(run: Path, host: Host) -> None:
    """Wait for some steps more."""
    before = step_of(run)
    wait_for(lambda: step_of(run) >= before + 6 or host.process.poll() is not None, "six more steps", 100)


@pytest.mark.full
def test_etcd_restarts_and_nothing_happens_the_leader_is_killed_and_another_host_leads(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with etcd_server(tmp_path) as server, cluster(tmp_path, "1:2", server.port) as found:
        first, second = start_two(found, *LONG)
        before = worlds(found.run)
        server.signal(signal.SIGKILL)
        go_on(found.run, first)  # workers need no etcd to make steps
        server.start()
        go_on(found.run, first)
        assert worlds(found.run) == before and "restart" not in kinds(found.run)
        workers = first.family()
        began = time.monotonic()
        first.kill()
        wait_for(lambda: not any(alive(pid) for pid in workers), "workers that die with their command", 20)
        wait_for(lambda: worlds(found.run) == [*before, 1] or second.process.poll() is not None, "another rank 0", 100)
        print(f"leader lost to another rank 0: {time.monotonic() - began:.1f} s")
        go_on(found.run, second)
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 75, second.said()
        check_ledgers(found.run, step_of(found.run))
        record_property("restart_seconds", seconds_of_restarts(found.run)[-1])
        assert kinds(found.run)[-1:] == ["restart"]
        told = events(found.run, "verdict")[-1]["what"]
        assert f"rank 0 on {first.name}: its host led the run, and is lost; {second.name} leads from now on" in told
        assert [event["host"] for event in events(found.run, "start")][-2:] == [first.name, second.name]
        assert f"{first.name} leads" in second.said()
        kept = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
        assert SECRET not in kept, "neither in a log nor in the run directory nor in etcd"


@pytest.mark.full
def test_a_leader_that_was_frozen_comes_back_and_commits_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with etcd_server(tmp_path) as server, cluster(tmp_path, "1:2", server.port) as found:
        first, second = start_two(found, *LONG, "checkpoint.keep=1000")
        before = worlds(found.run)
        newest = max(found.run.glob("checkpoints/step-*"))
        frozen = [first.process.pid, *first.family()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: worlds(found.run) == [*before, 1] or second.process.poll() is not None, "another rank 0", 100)
        go_on(found.run, second)
        for pid in reversed(frozen):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert first.end() == 76, first.said()
        last = first.said().strip().splitlines()[-1]
        assert "this host led, and" in last and "the others go on without it" in last, first.said()
        go_on(found.run, second)
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 75, second.said()
        check_ledgers(found.run, step_of(found.run))
        record_property("restart_seconds", seconds_of_restarts(found.run)[-1])
        later = [path for path in sorted(found.run.glob("checkpoints/step-*")) if path > newest]
        attempts = {Checkpoint.open(path).manifest.generation for path in later[1:]}
        assert attempts == {Run.open(found.run).attempts}, "but for one that it had committed before"
        assert not list(found.run.glob("checkpoints/*.tmp-*"))


@pytest.mark.full
def test_a_leader_that_is_asked_to_stop_leaves_and_the_other_leads(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server, cluster(tmp_path, "1:2", server.port) as found:
        words = ("train.steps=5000", "checkpoint.every=1000", "task.pause=0.1")
        first, second = start_two(found, *words)
        before = worlds(found.run)
        began = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 75, first.said()
        assert "this host leaves; the others go on from what all have saved" in first.said()
        wait_for(lambda: worlds(found.run) == [*before, 1] or second.process.poll() is not None, "another rank 0", 100)
        print(f"leader asked to stop to another rank 0: {time.monotonic() - began:.1f} s")
        go_on(found.run, second)
        third = found.start("hostc", *words)
        wait_for(lambda: worlds(found.run)[-2:] == [1, 2] or third.process.poll() is not None, "one that joins", 100)
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 75, second.said()
        wait_for(lambda: worlds(found.run)[-2:] == [2, 1] or third.process.poll() is not None, "the third leads", 100)
        go_on(found.run, third)
        third.process.send_signal(signal.SIGTERM)
        assert third.end() == 75, third.said()
        told = [event for event in events(found.run, "verdict") if event["kind"] != "join"]
        assert [event["kind"] for event in told] == ["leave"] * 4, told
        assert f"which is saved, {first.name} leaves, asked to stop" in told[0]["what"]
        led = f"rank 0 on {first.name}: its host led the run, and has left; {second.name} leads from now on"
        assert told[1]["what"] == led
        assert [event["step"] for event in events(found.run, "step")] == list(range(1, step_of(found.run) + 1))
        check_ledgers(found.run, step_of(found.run))


@pytest.mark.full
@pytest.mark.parametrize("spare", [False, True])
def test_of_a_fixed_number_another_host_takes_the_place_of_the_lost_leader(
    tmp_path: Path, record_property: Callable[[str, object], None], spare: bool
) -> None:
    # With a spare there are steps until it waits. An attempt calls the loss nine times before its first step, to see
    # what it is, and each pause is in the seconds that are measured: it is as short as in the other tests.
    last, words = (200, ("train.steps=200", "checkpoint.every=5", "task.pause=0.1")) if spare else (40, SETTINGS)
    with etcd_server(tmp_path) as server, cluster(tmp_path, "2", server.port) as found:
        first, second = start_two(found, *words)
        third = found.start("hostc", *words) if spare else None
        if third is not None:
            (state,) = [key for key in server.list_keys() if key.endswith("/rendezvous")]
            wait_for(lambda: '"spare":[["' in getattr(server.client.read(state), "text", ""), "a third that waits")
        first.kill()
        third = third or found.start("hostc", *words)
        assert (second.end(), third.end()) == (0, 0), second.said() + third.said()
        check_ledgers(found.run, last)
        (seconds,) = seconds_of_restarts(found.run)
        record_property("restart_seconds" if spare else "replaced_seconds", seconds)
        told = [event["what"] for event in events(found.run, "verdict")]
        assert len(told) == 1 and f"on {first.name}: its host led the run, and is lost" in told[0]
        check_as_on_one_host(found.run, tmp_path, last)


@pytest.mark.full
def test_a_stranger_in_etcd_at_worst_stops_the_run(tmp_path: Path) -> None:
    garbage = "cos\nsystem\n(S'touch harm'\ntR."
    with etcd_server(tmp_path) as server, cluster(tmp_path, "2", server.port) as found:
        first, second = start_two(found, *SETTINGS, "task.pause=0.2")
        (state,) = [key for key in server.list_keys() if key.endswith("/rendezvous")]
        server.client.put(state, garbage, 0)
        for host in (first, second):
            assert host.end() == 76
            last = host.said().strip().splitlines()[-1]
            assert "somebody without this run's secret writes at etcd://" in last, host.said()
        assert not list(tmp_path.rglob("harm"))


@pytest.mark.full
def test_a_run_whose_hosts_are_all_lost_goes_on_when_they_are_started_again(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server, cluster(tmp_path, "2", server.port) as found:
        for host in start_two(found, *SETTINGS, "task.pause=0.2"):
            host.kill()
        again = [found.start(name, *SETTINGS, "task.pause=0.2") for name in ("hostc", "hostd")]
        assert [host.end() for host in again] == [0, 0], again[0].said() + again[1].said()
        check_ledgers(found.run)


@pytest.mark.full
def test_who_has_another_config_or_secret_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server, cluster(tmp_path, "2", server.port) as found:
        first = found.start("hosta", *SETTINGS)
        wait_for((found.run / "lease").exists, "a leader")
        other = found.start("hostb", *SETTINGS, "train.seed=5")
        stranger = found.start("hostc", *SETTINGS, secret="another secret of another run")
        assert (other.end(), stranger.end()) == (78, 2), other.said() + stranger.said()
        assert f"which leads the run at {found.rendezvous}/run: give all hosts the same task" in other.said()
        assert "was not signed with this host's secret" in stranger.said()
        second = found.start("hostd", *SETTINGS)
        assert (first.end(), second.end()) == (0, 0), first.said() + second.said()
