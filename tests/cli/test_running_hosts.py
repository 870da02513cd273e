"""`allranks train --nodes`: several commands that are one run, and what becomes of it when one of them is lost."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import list_checkpoints
from allranks.checkpointing.host_memory import SHARED_MEMORY
from allranks.cli import running_hosts
from allranks.cli.main import main
from allranks.cli.running_hosts import facts_here
from allranks.config import Config
from allranks.errors import LayoutError, RunError
from allranks.hosts_request import Endpoint, HostsRequest
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving import forkserver
from allranks.surviving.memory_tier import open_memory
from allranks.training.planned_layout import Decided, settle
from allranks.training.prepare import open_run, prepare
from tests.checkpointing.worlds import header, save_alone
from tests.commands import POINTS, PROGRAMS, alive, allranks, seconds_of_restarts, steps, tensor_digests, wait_for
from tests.free_port import free_port
from tests.hosts import SECRET, Cluster, Host, cluster

pytestmark = pytest.mark.distributed
SETTINGS = ("train.steps=40", "checkpoint.every=5", "task.pause=0.05")


def events(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in Run.open(run).events(rank) if event["event"] == kind]


def step_of(run: Path) -> int:
    return max(steps(run), default=0)


def start_two(found: Cluster, *words: str) -> tuple[Host, Host]:
    """The leader on hosta, another host on hostb, some steps into the run."""
    first = found.start("hosta", *words)
    found.wait_until_led()
    second = found.start("hostb", *words)
    wait_for(lambda: step_of(found.run) >= 7 or first.process.poll() is not None, "step 7")
    return first, second


def check_as_on_one_host(run: Path, folder: Path, last: int = 40) -> None:
    """It ended as the same run of one host with as many workers, which is made in `folder`, does."""
    words = ("--device", "cpu", "--run", "alone", "--nproc", "2", "--layout", "ddp")
    allranks("train", POINTS, *words, f"train.steps={last}", "checkpoint.every=5", folder=folder)
    assert tensor_digests(run, last) == tensor_digests(folder / "alone", last)
    ledgers = [[line["ledger"] for line in steps(one).values()] for one in (run, folder / "alone")]
    assert ledgers[0] == ledgers[1]


def check_ledgers(run: Path, last: int = 40) -> None:
    """Every step once or more, always with the same samples."""
    said: dict[int, set[object]] = {}
    for event in events(run, "step"):
        said.setdefault(event["step"], set()).add(event["ledger"])
    assert sorted(said) == list(range(1, last + 1)) and {len(each) for each in said.values()} == {1}


def test_a_host_that_comes_after_a_rollback_has_the_same_facts() -> None:
    def facts(*words: str) -> Any:
        prepared = prepare(TrainRequest(task_spec=POINTS, overrides=("train.steps=9", *words)))
        return facts_here(prepared, HostsRequest(2, 2, Endpoint("hosta", 29500)))

    assert facts() == facts("data.skip=40:60") != facts("train.seed=1")
    assert facts() != facts("layout.dp_shard=*")


def test_a_host_that_comes_after_a_plan_has_the_same_facts(tmp_path: Path) -> None:
    """It reads in the Run directory what those that came before it had not decided yet."""
    hosts = HostsRequest(2, 2, Endpoint("hosta", 29500))
    request = TrainRequest(task_spec=POINTS, overrides=("train.steps=9",), run=tmp_path / "run")
    before = prepare(request)
    words = ("layout.dp_shard=*", "train.micro_batch=2")
    made = open_run(settle(before, Decided((), words, {"decided": list(words)})), request)
    made.journal().write_text('{"event": "step", "step": 1}\n')
    made.release()
    after = prepare(request)
    assert after.config.layout.chosen and not before.config.layout.chosen
    again = prepare(TrainRequest(resume=tmp_path / "run"))
    assert facts_here(before, hosts) == facts_here(after, hosts) == facts_here(again, hosts)
    assert facts_here(before, hosts) != facts_here(prepare(replace(request, layout="ddp")), hosts)


def test_a_killed_worker_and_a_lost_host_cost_no_sample(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with cluster(tmp_path) as found:
        first, second = start_two(found, *SETTINGS)
        os.kill(events(found.run, "start", rank=1)[-1]["pid"], signal.SIGKILL)
        wait_for(lambda: len(events(found.run, "resume")) == 1, "a second attempt", 100)
        wait_for(lambda: step_of(found.run) >= 12, "a step of it", 100)
        workers = second.family()
        second.kill()
        wait_for(lambda: len(events(found.run, "verdict")) == 2, "a host that is missed", 100)
        wait_for(lambda: not any(alive(pid) for pid in workers), "workers that die with their command", 20)
        third = found.start("hostc", *SETTINGS)
        assert (first.end(), third.end()) == (0, 0), first.said() + third.said()
        check_ledgers(found.run)
        killed, replaced = seconds_of_restarts(found.run)
        record_property("restart_seconds", killed)
        record_property("replaced_seconds", replaced)
        told = [event["what"] for event in events(found.run, "verdict")]
        assert [(told[0][:9], second.name in told[0], "SIGKILL" in told[0])] == [("restart 1", True, True)]
        assert f"rank 1 on {second.name}: its host is lost: workers have lost their connection, and it" in told[1]
        assert [event["host"] for event in events(found.run, "start", rank=1)] == [second.name] * 2 + [third.name]
        assert f"rank 1 of 2; {first.name} leads" in third.said()
        kept = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
        assert SECRET not in kept, "neither in a log nor in the run directory"


def first_step_of_an_attempt(run: Path, number: int) -> float:
    """When it was done, in Unix seconds."""
    told = Run.open(run).events()
    start = [place for place, event in enumerate(told) if event["event"] == "start"][number - 1]
    return next(float(event["t"]) for event in told[start:] if event["event"] == "step")


@pytest.mark.full
def test_a_host_joins_and_is_lost_and_no_sample_with_it(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    def attempts() -> list[int]:
        return [event["world_size"] for event in events(found.run, "start")]

    def go_on() -> None:
        before = step_of(found.run)
        wait_for(lambda: step_of(found.run) >= before + 3, "three more steps", 100)

    with cluster(tmp_path, "1:2") as found:
        long = ("train.steps=5000", "checkpoint.every=5", "task.pause=0.1")
        first = found.start("hosta", *long)
        wait_for(lambda: step_of(found.run) >= 4, "step 4 on one host", 100)
        asked_at = time.time()
        second = found.start("hostb", *long)
        wait_for(lambda: attempts() == [1, 2], "an attempt on two hosts", 100)
        go_on()
        record_property("join_seconds", first_step_of_an_attempt(found.run, 2) - asked_at)
        second.kill()
        wait_for(lambda: attempts() == [1, 2, 1], "an attempt on the one that is left", 100)
        go_on()
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 75, first.said()
        check_ledgers(found.run, step_of(found.run))
        record_property("restart_seconds", seconds_of_restarts(found.run)[1])  # the first is the join
        told = [(event["kind"], event["what"]) for event in events(found.run, "verdict")]
        assert [kind for kind, _ in told] == ["join", "restart"]
        assert f"rank 1 on {second.name}: its host is lost" in told[1][1]
        saved = re.search(r"after step (\d+), which is saved", told[0][1])
        assert saved is not None
        assert events(found.run, "resume")[0]["step"] == int(saved[1]), "no finished step is lost by a join"
        alone = ("--device", "cpu", "--run", "alone", "--layout", "single", f"train.steps={step_of(found.run)}")
        allranks("train", POINTS, *alone, folder=tmp_path)
        ledgers = [[line["ledger"] for line in steps(run).values()] for run in (found.run, tmp_path / "alone")]
        assert ledgers[0] == ledgers[1], "the samples of every step are those of one process"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sharded_over_one_to_four_hosts_every_step_has_the_samples_of_one_process(tmp_path: Path) -> None:
    def attempts() -> list[int]:
        return [event["world_size"] for event in events(found.run, "start")]

    def go_on(hosts: int) -> None:
        wait_for(lambda: attempts()[-1] == hosts, f"an attempt on {hosts}", 200)
        before = step_of(found.run)
        wait_for(lambda: step_of(found.run) >= before + 3, "three more steps", 100)

    with cluster(tmp_path, "1:4") as found:
        long = ("train.steps=5000", "checkpoint.every=5", "task.pause=0.1", "--layout", "fsdp")
        first = found.start("hosta", *long)
        wait_for(lambda: step_of(found.run) >= 4, "step 4 on one host", 100)
        others = [found.start(name, *long) for name in ("hostb", "hostc", "hostd")]
        go_on(4)
        others[1].kill()
        go_on(3)
        first.process.send_signal(signal.SIGINT)
        assert first.end() == 130, first.said()
        last = step_of(found.run)
        check_ledgers(found.run, last)
        alone = ("--device", "cpu", "--run", "alone", "--layout", "single", f"train.steps={last}")
        allranks("train", POINTS, *alone, folder=tmp_path)
        told = [list(steps(run).values()) for run in (found.run, tmp_path / "alone")]
        assert [line["ledger"] for line in told[0]] == [line["ledger"] for line in told[1]]


@pytest.mark.full
def test_a_host_that_is_asked_to_stop_leaves_and_the_other_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, "1:2") as found:
        words = ("train.steps=5000", "checkpoint.every=1000", "task.pause=0.1")
        first = found.start("hosta", *words)
        found.wait_until_led()
        second = found.start("hostb", *words)
        wait_for(lambda: step_of(found.run) >= 1, "a step", 100)
        wait_for(lambda: [event["world_size"] for event in events(found.run, "start")][-1:] == [2], "two hosts", 100)
        before = step_of(found.run)
        wait_for(lambda: step_of(found.run) >= before + 3, "three steps", 100)
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 75, second.said()
        assert "this host leaves; the others go on from what all have saved" in second.said()
        wait_for(lambda: [event["world_size"] for event in events(found.run, "start")][-2:] == [2, 1], "one host", 100)
        before = step_of(found.run)
        wait_for(lambda: step_of(found.run) >= before + 3, "three steps alone", 100)
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 75, first.said()
        told = events(found.run, "verdict")[-1]
        assert (told["kind"], f"{second.name} leaves, asked to stop" in told["what"]) == ("leave", True)
        saved = re.search(r"after step (\d+), which is saved", told["what"])
        assert saved is not None and events(found.run, "resume")[-1]["step"] == int(saved[1])
        lines = [event["step"] for event in events(found.run, "step")]
        assert lines == list(range(1, step_of(found.run) + 1)), "no step is lost, and none is made twice"
        check_ledgers(found.run, step_of(found.run))


@pytest.mark.full
def test_a_host_that_waits_takes_the_place_of_one_that_is_asked_to_stop(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        words = ("train.steps=5000", "checkpoint.every=1000", "task.pause=0.1")
        first = found.start("hosta", *words)
        found.wait_until_led()
        second = found.start("hostb", *words)
        wait_for(lambda: step_of(found.run) >= 2, "two steps", 100)
        third = found.start("hostc", *words)
        full = "all 2 places are taken: this host waits until one is free"
        wait_for(lambda: full in third.said(), "a third that waits", 100)
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 75, second.said()
        wait_for(lambda: f"rank 1 of 2; {first.name} leads" in third.said(), "the third in its place", 100)
        before = step_of(found.run)
        wait_for(lambda: step_of(found.run) >= before + 3, "three steps with it", 100)
        first.process.send_signal(signal.SIGTERM)
        assert (first.end(), third.end()) == (75, 75), first.said() + third.said()
        (told,) = events(found.run, "verdict")
        assert (told["kind"], f"{second.name} leaves, asked to stop" in told["what"]) == ("leave", True)
        assert [event["step"] for event in events(found.run, "step")] == list(range(1, step_of(found.run) + 1))
        check_ledgers(found.run, step_of(found.run))


@pytest.mark.full
def test_the_end_is_that_of_one_host_with_as_many_workers(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        first, second = start_two(found, *SETTINGS)
        os.kill(events(found.run, "start", rank=0)[-1]["pid"], signal.SIGKILL)
        assert (first.end(), second.end()) == (0, 0), first.said() + second.said()
        check_ledgers(found.run)
        check_as_on_one_host(found.run, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_leader_the_others_end_with_one_line(tmp_path: Path, number: signal.Signals) -> None:
    with cluster(tmp_path) as found:
        first, second = start_two(found, *SETTINGS, "task.pause=0.2")
        workers = second.family()
        began = time.monotonic()
        first.process.send_signal(number)
        assert second.end() == 76
        assert time.monotonic() - began < 60, "a cap; guard.host_seconds is 11.5"
        wait_for(lambda: not any(alive(pid) for pid in workers), "workers that end with their command", 20)
        last = second.said().strip().splitlines()[-1]
        assert re.search(
            r"error: the host at 127\.0\.0\.1:\d+, where the others meet, is gone \(.+\); the run is", last
        )
        assert "frame #" not in second.said()
        first.close()
        again = Cluster(tmp_path)
        try:
            third, fourth = start_two(again, *SETTINGS, "task.pause=0.2")
            assert (third.end(), fourth.end()) == (0, 0), third.said() + fourth.said()
            check_ledgers(found.run)
        finally:
            again.close()


@pytest.mark.full
def test_a_rank_that_hangs_is_named_with_its_host_and_line_on_every_host(tmp_path: Path) -> None:
    with cluster(tmp_path, task=str(PROGRAMS / "faulty.py")) as found:
        faulty = ("train.global_batch=8", "guard.hang_seconds=3", "task.fault=straggler", "train.steps=30")
        first = found.start("hosta", *faulty, "checkpoint.every=5")
        found.wait_until_led()
        second = found.start("hostb", *faulty, "checkpoint.every=5")
        assert (first.end(), second.end()) == (0, 0), first.said() + second.said()
        check_ledgers(found.run, 30)
        told = events(found.run, "verdict")
        assert [event["kind"] for event in told] == ["straggler", "restart"], told
        place = rf"rank 1 on {second.name} is busy at .*faulty\.py:\d+ in meet, and the others wait for it"
        assert re.search(place, told[0]["what"]), told[0]
        assert all(told[0]["what"] in host.said() for host in (first, second)), first.said() + second.said()
        assert any(line.startswith(f"rank 0 on {first.name} (pid") for line in told[0]["evidence"]), told[0]
        assert any("waits in all_reduce number" in line for line in told[0]["evidence"]), told[0]
        assert f"rank 1 on {second.name}: no progress for" in told[1]["what"]


@pytest.mark.full
def test_a_request_to_stop_one_host_saves_and_stops_all(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        first, second = start_two(found, *SETTINGS, "task.pause=0.2")
        second.process.send_signal(signal.SIGTERM)
        assert (first.end(), second.end()) == (75, 75), first.said() + second.said()
        newest = max(found.run.glob("checkpoints/step-*"))
        assert int(newest.name.rpartition("-")[2]) == step_of(found.run)


@pytest.mark.full
def test_an_error_of_the_users_ends_all_hosts_with_it(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        first = found.start("hosta", *SETTINGS, "task.boom_rank=1")
        found.wait_until_led()
        second = found.start("hostb", *SETTINGS, "task.boom_rank=1")
        assert (first.end(), second.end()) == (1, 1)
        for host in (first, second):
            assert f"rank 1 on {second.name} failed:" in host.said()
            assert host.said().strip().endswith("ValueError: the user's own mistake")


@pytest.mark.full
def test_who_has_another_config_or_secret_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        first = found.start("hosta", *SETTINGS)
        found.wait_until_led()
        other = found.start("hostb", *SETTINGS, "train.seed=5")
        stranger = found.start("hostc", *SETTINGS, secret="another secret of another run")
        assert (other.end(), stranger.end()) == (78, 2), other.said() + stranger.said()
        assert f"which leads the run at {found.endpoint}: give all hosts the same task" in other.said()
        assert "was not signed with this host's secret" in stranger.said()
        second = found.start("hostd", *SETTINGS)
        assert (first.end(), second.end()) == (0, 0), first.said() + second.said()


@pytest.mark.full
def test_who_waits_in_vain_ends_with_76_and_says_for_whom(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        first = found.start("hosta", *SETTINGS, "guard.join_seconds=8")
        assert first.end() == 76
        assert re.search(r"error: 1 of 2 hosts are here \(.+\); the others did not come to .* within 8 s", first.said())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--nodes", "2"], 2, "--nodes 2 needs --rendezvous"),
        (["--nodes", "2:1", "--rendezvous", "c10d://h:1"], 2, "MIN not above MAX"),
        (["--nodes", "2", "--rendezvous", "etcd://h:1"], 2, "several hosts need a secret"),
        (["--nodes", "2", "--rendezvous", "c10d://h:1"], 2, "several hosts need a secret"),
        (["--nodes", "2", "--rendezvous", "c10d://h:1", "--show-sharding"], 2, "--show-sharding makes one step"),
    ],
)
def test_refusals_are_one_line(
    words: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", POINTS, *words]) == code
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_secret_in_a_variable_reaches_no_worker_of_a_run_that_has_no_use_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLRANKS_SECRET", "a secret of sixteen bytes")
    assert main(["train", POINTS, "--show"]) == 0
    assert "ALLRANKS_SECRET" not in os.environ


def test_under_another_launcher_nodes_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", POINTS, "--nodes", "2", "--rendezvous", f"c10d://127.0.0.1:{free_port()}"]) == 2
    assert "--nodes starts the workers of this host itself: leave environment out" in capsys.readouterr().err


def test_copies_need_memory_that_looks_like_a_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(forkserver, "start", lambda *_, **__: None)
    monkeypatch.setattr(os, "access", lambda path, mode: path != SHARED_MEMORY)
    monkeypatch.setenv("ALLRANKS_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    hosts = ["--nodes", "2", "--rendezvous", f"c10d://127.0.0.1:{free_port()}", "--nproc", "1"]
    assert main(["train", POINTS, "checkpoint.memory_every=5", *hosts]) == 2
    error = capsys.readouterr().err.strip()
    assert "checkpoint.memory_every: /dev/shm is not there, or not to be written to" in error and "\n" not in error
    assert list(tmp_path.iterdir()) == []


def test_the_others_know_that_the_leader_plans_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def plan(*given: Any) -> Any:
        assert said == ["planning"]
        raise LayoutError("planned")

    monkeypatch.setattr("allranks.surviving.hosts.introduction.learn", lambda *asked: None)  # it leads
    monkeypatch.setattr(running_hosts, "plan_for_hosts", plan)
    given: Any = SimpleNamespace(
        notices=SimpleNamespace(post=lambda key, value: said.append(key)),
        hosts=SimpleNamespace(endpoint=None, nodes=2),
        **{"config": Config(), "seek": None, "is_open": True},
    )
    with pytest.raises(LayoutError, match="planned"):
        running_hosts._share_run(given, given, given, given, 1)


def test_a_run_that_the_leader_has_just_made_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS that has not found it before goes on saying so."""
    path = tmp_path / "run"
    create = partial(Run.create, tmp_path, "task", Config(), {}, directory=path)
    monkeypatch.setattr("allranks.checkpointing.looking_again.await_run", lambda seen: create())
    assert running_hosts._open_shared(path).path == path
    monkeypatch.setattr("allranks.checkpointing.looking_again.await_run", lambda seen: None)
    with pytest.raises(RunError, match="all hosts need a file system on which they see the same run directory"):
        running_hosts._open_shared(tmp_path / "none")


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
def test_what_the_leader_alone_has_in_memory_is_on_the_disk_before_others_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path, "task", Config(), {}, directory=tmp_path / "run")
    tier = open_memory(run, wanted=True)
    assert tier is not None
    try:
        tier.begin_attempt()
        save_alone(tier.directory, header=header(30, run=run.id))
        tier._memory.release()  # the command is killed
        monkeypatch.setattr("allranks.training.prepare.open_run", lambda prepared, request: Run.open(run.path))
        monkeypatch.setattr("allranks.surviving.hosts.introduction.introduce", lambda *told: None)
        monkeypatch.setattr("allranks.surviving.hosts.introduction.learn", lambda *asked: None)  # it leads
        hosts, seating = HostsRequest(2, 2, Endpoint("hosta", 29500)), SimpleNamespace()
        given: Any = SimpleNamespace(
            notices=None, hosts=hosts, config=Config(), seek=None, seating=seating, is_open=False
        )
        shared, decided = running_hosts._share_run(given, given, given, given, 1)
        assert (shared.attempts, decided) == (2, ())
        assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-00000030"]
        assert not tier.directory.exists() and "step-00000030, which was in" in capsys.readouterr().err
    finally:
        shutil.rmtree(tier.directory, ignore_errors=True)
