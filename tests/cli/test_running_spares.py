"""`allranks train --nodes MIN:MAX` where the layout does not take every number of hosts: who is left over waits."""

import re
import signal
from pathlib import Path

import pytest

from tests.cli.test_running_hosts import check_ledgers, events, step_of
from tests.commands import POINTS, PROGRAMS, allranks, steps, wait_for
from tests.etcd_server import etcd_server, needs_etcd
from tests.hosts import Cluster, Host, cluster

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]
LONG = ("train.steps=5000", "checkpoint.every=5", "task.pause=0.1")
EXPERTS = str(PROGRAMS / "experts.py")
SPARE = "this host waits as a spare: of the workers that are there {} train"


def go_on_as(found: Cluster, workers: int, *hosts: Host) -> None:
    """Wait for an attempt of so many workers, and some steps of it."""

    def is_there() -> bool:
        assert all(host.process.poll() is None for host in hosts), "".join(host.said() for host in hosts)
        started = events(found.run, "start") if (found.run / "run.json").exists() else []
        return bool(started) and started[-1]["world_size"] == workers

    wait_for(is_there, f"an attempt of {workers} workers")
    before = step_of(found.run)
    wait_for(lambda: step_of(found.run) >= before + 3, "three more steps")


def worlds(found: Cluster) -> list[int]:
    """How many workers each attempt had."""
    return [event["world_size"] for event in events(found.run, "start")]


def verdicts(found: Cluster) -> list[tuple[str, str]]:
    return [(event["kind"], event["what"]) for event in events(found.run, "verdict")]


def check_samples_of_one_process(found: Cluster, task: str, *words: str) -> None:
    """Every step had the samples that it has in a run of one process."""
    last = step_of(found.run)
    check_ledgers(found.run, last)
    alone = ("--device", "cpu", "--run", "alone", "--layout", "single", "--nproc", "1", f"train.steps={last}")
    allranks("train", task, *alone, *words, folder=found.folder)
    ours, theirs = ([line["ledger"] for line in steps(run).values()] for run in (found.run, found.folder / "alone"))
    assert ours == theirs


@pytest.mark.parametrize(
    ("layout", "task"),
    [("tp=2,dp_shard=*", POINTS), ("dp_shard=*,ep=2", EXPERTS)],
    ids=["tp", "ep"],
)
def test_a_spare_takes_a_lost_hosts_place_and_a_fourth_host_makes_two_more_of_use(
    tmp_path: Path, layout: str, task: str
) -> None:
    words = ("train.global_batch=8", "--layout", layout)
    with cluster(tmp_path, "1:4", task=task) as found:
        first = found.start("hosta", *LONG, *words)
        found.wait_until_led()
        wait_for(lambda: "the layout does not take 1 worker(s)" in first.said() or layout.startswith("dp"), "too few")
        second = found.start("hostb", *LONG, *words)
        go_on_as(found, 2, first, second)
        third = found.start("hostc", *LONG, *words)
        wait_for(lambda: SPARE.format(2) in third.said(), "a spare")
        assert set(worlds(found)) == {2}, "nobody is stopped for it"
        second.kill()
        wait_for(lambda: f"rank 1 of 2; {first.name} leads" in third.said(), "the spare in its place")
        go_on_as(found, 2, first, third)
        fourth, fifth = (found.start(name, *LONG, *words) for name in ("hostd", "hoste"))
        go_on_as(found, 4, first, third, fourth, fifth)
        third.process.send_signal(signal.SIGTERM)
        assert third.end() == 75, third.said()
        wait_for(lambda: any(SPARE.format(2) in one.said() for one in (fourth, fifth)), "another spare")
        go_on_as(found, 2, first, fourth, fifth)
        first.process.send_signal(signal.SIGINT)
        assert [one.end() for one in (first, fourth, fifth)] == [130, 130, 130], first.said()
        told = verdicts(found)
        assert [kind for kind, _ in told][:2] == ["spare", "restart"], told
        assert told[0][1].startswith(f"{third.name} waits as a spare: of the workers that are there 2 train, and lay")
        assert [kind for kind, _ in told][-3:] == ["join", "leave", "spare"], told
        check_samples_of_one_process(found, task, "train.global_batch=8")


def test_a_batch_that_three_do_not_divide_leaves_one_of_three_hosts_over(tmp_path: Path) -> None:
    """pp cuts a step into micro-steps of one shape; two stages in each of the two hosts' workers."""
    words = ("train.global_batch=8", "--layout", "pp=2,dp_shard=*", "--nproc", "2")
    with cluster(tmp_path, "1:3") as found:
        first = found.start("hosta", *LONG, *words)
        found.wait_until_led()
        others = [found.start(name, *LONG, *words) for name in ("hostb", "hostc")]
        go_on_as(found, 4, first, *others)
        wait_for(lambda: any(SPARE.format(4) in one.said() for one in others), "a spare")
        training = next(one for one in others if "leads" in one.said().strip().splitlines()[-1])
        (spare,) = (one for one in others if one is not training)
        spare.process.send_signal(signal.SIGTERM)
        assert spare.end() == 76, "it alone ends"
        before = worlds(found)
        training.kill()
        go_on_as(found, 2, first)
        assert worlds(found)[: len(before)] == before
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 75, first.said()
        check_samples_of_one_process(found, POINTS, "train.global_batch=8")


def test_below_what_the_layout_needs_all_is_saved_and_the_run_ends_with_76(tmp_path: Path) -> None:
    words = ("--layout", "tp=2,dp_shard=*", "guard.join_seconds=25", "checkpoint.every=1000")
    with cluster(tmp_path, "1:3") as found:
        first = found.start("hosta", *LONG[::2], *words)
        found.wait_until_led()
        second = found.start("hostb", *LONG[::2], *words)
        go_on_as(found, 2, first, second)
        second.process.send_signal(signal.SIGTERM)
        assert (first.end(), second.end()) == (75, 75), first.said() + second.said()
        last = step_of(found.run)
        assert (found.run / f"checkpoints/step-{last:08d}/COMMITTED").exists(), "too few would be left: all have saved"
    with cluster(tmp_path, "1:3") as found:
        first = found.start("hosta", *LONG[::2], *words)
        found.wait_until_led()
        second = found.start("hostb", *LONG[::2], *words)
        wait_for(lambda: step_of(found.run) >= last + 3, "steps of another start")
        second.kill()
        assert first.end() == 76, first.said()
        said = first.said().strip().splitlines()[-1]
        assert re.search(r"1 of 3 hosts are here \(\S+\), too few to train: the layout does not take 1 worker", said), (
            said
        )
        assert (found.run / f"checkpoints/step-{last:08d}/COMMITTED").exists()


def test_some_workers_of_a_host_may_be_left_over(tmp_path: Path) -> None:
    words = ("train.global_batch=8", "--layout", "tp=2,dp_shard=*", "--nproc", "3")
    with cluster(tmp_path, "1:2") as found:
        first = found.start("hosta", *LONG, *words)
        go_on_as(found, 2, first)
        second = found.start("hostb", *LONG, *words)
        go_on_as(found, 6, first, second)
        second.kill()
        go_on_as(found, 2, first)
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 75, first.said()
        told = verdicts(found)
        assert [kind for kind, _ in told] == ["spare", "join", "restart", "spare"], told
        assert told[0][1].startswith(
            f"1 of 3 workers on {first.name} waits as a spare: of the workers that are there 2"
        )
        check_samples_of_one_process(found, POINTS, "train.global_batch=8")


@needs_etcd
def test_in_etcd_a_spare_takes_the_place_of_the_lost_leader(tmp_path: Path) -> None:
    words = (*LONG, "--layout", "tp=2,dp_shard=*")
    with etcd_server(tmp_path) as server, cluster(tmp_path, "1:3", server.port) as found:
        hosts = [found.start(name, *words) for name in ("hosta", "hostb", "hostc")]
        go_on_as(found, 2, *hosts)
        wait_for(lambda: any(SPARE.format(2) in one.said() for one in hosts), "a spare")
        led = events(found.run, "start")[-1]["host"]
        (leader,) = (one for one in hosts if one.name == led)
        rest = [one for one in hosts if one is not leader]
        before = worlds(found)
        leader.kill()
        wait_for(lambda: worlds(found) == [*before, 2], "another attempt of two")
        go_on_as(found, 2, *rest)
        rest[0].process.send_signal(signal.SIGINT)
        assert [one.end() for one in rest] == [130, 130], rest[0].said() + rest[1].said()
        assert f"on {leader.name}: its host led the run, and is lost" in verdicts(found)[-1][1]
        check_samples_of_one_process(found, POINTS)
