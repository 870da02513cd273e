"""Runs of the real command whose mirror is in a real S3 server: lost and found, refused, cut off, and very slow."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.run import Run
from tests.commands import LIMIT_SECONDS, PROGRAMS, allranks, running, steps, tensor_digests, wait_for
from tests.s3_server import BUCKET, S3Server, line, needs_s3, s3_server

TASK = str(PROGRAMS / "faulty.py")
URL = f"s3://{BUCKET}/mine"
WORDS = (
    "train",
    TASK,
    "train.global_batch=8",
    "checkpoint.every=5",
    "--nproc",
    "2",
    "--layout",
    "ddp",
    "guard.slow_rank=off",
    "--run",
    "run",
)
MIRROR = f"checkpoint.mirror={URL}"
RESUME = ("train", "--resume", "run", "--nproc", "2", "--layout", "ddp")

pytestmark = [needs_s3, pytest.mark.distributed]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def server(shared: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """As users name it to a command: by the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", shared.endpoint)
    return shared


def told(run: Path) -> list[dict[str, Any]]:
    return [event for event in Run.open(run).events() if event["event"] == "verdict"]


def mirrored(server: S3Server, run: Path) -> list[str]:
    """The names that count there."""
    found = server.files.find(f"{BUCKET}/mine/{Run.open(run).id}")
    return sorted(path.split("/")[-2].split(".")[0] for path in found if path.endswith("/COMMITTED"))


@pytest.mark.full
def test_a_run_that_has_lost_its_directory_s_checkpoints_goes_on_from_s3(server: S3Server, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    allranks(*WORDS, "train.steps=12", MIRROR, folder=tmp_path)
    # Where copying is slower than saving what comes between is left out: 10, or the first one instead of it.
    assert mirrored(server, run)[-1] == "step-00000012" and len(mirrored(server, run)) == 2 and not told(run)
    shutil.rmtree(run / "checkpoints")
    ran = allranks(*RESUME, "train.steps=15", folder=tmp_path)
    assert f"step-00000012 came back from {URL}" in ran.stdout + ran.stderr
    assert mirrored(server, run) == ["step-00000012", "step-00000015"]
    allranks(*WORDS[:-1], "whole", "train.steps=15", folder=tmp_path)
    assert tensor_digests(run, 15) == tensor_digests(whole, 15)


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("s3://another/mine", "cannot be written: FileNotFoundError: The specified bucket does not exist"),
        ("nobody", "cannot be listed: PermissionError: The AWS Access Key Id you provided does not exist"),
        ("nowhere", "cannot be listed: EndpointConnectionError: Could not connect to the endpoint URL"),
    ],
)
def test_what_is_wrong_with_the_place_is_one_line_and_the_run_goes_on(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, says: str
) -> None:
    """Where all checkpoints are lost as well, nothing begins anew: exit code 78."""
    run = tmp_path / "run"
    if place == "nowhere":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    server.refuse_everybody(0 if place == "nobody" else -1)
    try:
        mirror = f"checkpoint.mirror={place if place.startswith('s3') else URL}"
        ran = allranks(*WORDS, "train.steps=12", mirror, folder=tmp_path)
        assert list(steps(run)) == list(range(1, 13)) and {event["kind"] for event in told(run)} == {"checkpoint"}
        *on_the_way, at_the_end = [event["what"] for event in told(run)]
        assert [says in what for what in on_the_way].count(True) == 1, on_the_way
        said = (ran.stdout + ran.stderr).splitlines()
        assert sum(line.startswith("warning:") and says in line for line in said) in (1, 2), said
        assert at_the_end.endswith("; the run ends, and has no copy of step-00000012 there: a resume makes it")
        shutil.rmtree(run / "checkpoints")
        ran = allranks(*RESUME, "train.steps=15", folder=tmp_path, check=78)
        refused = [line for line in ran.stderr.splitlines() if "and the mirror gives none" in line]
        assert len(refused) == 1 and "checkpoint.mirror=none begins anew" in refused[0], ran.stderr
    finally:
        server.refuse_everybody(-1)
    assert not server.files.exists("another"), "nobody has made a bucket"


@pytest.mark.full
def test_a_server_that_stands_still_holds_no_run_up_for_ever(server: S3Server, tmp_path: Path) -> None:
    """It answers no more from step 7 on: the steps go on, the end waits for half of guard.checkpoint_seconds."""
    run = tmp_path / "run"
    words = (*WORDS, "train.steps=200", MIRROR, "guard.checkpoint_seconds=40", "guard.hang_seconds=20")
    try:
        with running(*words, folder=tmp_path) as command:
            wait_for(lambda: 7 in steps(run), "step 7")
            server.signal(signal.SIGSTOP)
            said, _ = command.communicate(timeout=LIMIT_SECONDS)
    finally:
        server.signal(signal.SIGCONT)
    assert command.returncode == 0, said
    assert list(steps(run)) == list(range(1, 201)) and Run.open(run).attempts == 1
    first, last = told(run)
    assert first["kind"] == "checkpoint" and "TimeoutError: nothing has come further there for 20.0 s" in first["what"]
    assert last["kind"] == "checkpoint" and last["what"].endswith("step-00000200 there: a resume makes it")
    allranks(*RESUME, folder=tmp_path)
    assert mirrored(server, run)[-1] == "step-00000200", "a resume brings the rest"


@pytest.mark.full
def test_a_worker_that_is_killed_while_it_uploads_leaves_nothing_half_visible(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with line(server.port) as cable:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{cable.port}")
        words = (*WORDS, "train.steps=100", MIRROR, "task.width=100000", "guard.restarts=1")
        with running(*words, folder=tmp_path) as command:
            wait_for(lambda: (run / "run.json").exists() and mirrored(server, run), "a checkpoint in the mirror")
            before, sent = mirrored(server, run), cable.sent
            wait_for(lambda: cable.sent > sent + 100_000, "another one on its way")
            cable.holds = True
            pids = {event["rank"]: event["pid"] for event in Run.open(run).events() if event["event"] == "start"}
            os.kill(pids[0], signal.SIGKILL)
            assert set(before) <= set(mirrored(server, run))
            cable.cut()
            cable.holds = False
            said, _ = command.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == 0 and Run.open(run).attempts == 2, said
    assert mirrored(server, run)[-1] == "step-00000100" and len(mirrored(server, run)) == 2


@pytest.mark.full
def test_what_comes_back_for_longer_than_a_start_may_take_is_no_hang(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some megabytes over a line of 100 kB/s, where a start may take 25 s: both ranks show that it comes further."""
    run = tmp_path / "run"
    allranks(*WORDS, "train.steps=5", MIRROR, "task.width=90000", folder=tmp_path)
    shutil.rmtree(run / "checkpoints")
    with line(server.port) as cable:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{cable.port}")
        cable.rate = 100_000
        ran = allranks(*RESUME, "train.steps=6", "guard.first_step_seconds=25", folder=tmp_path)
    assert Run.open(run).attempts == 2 and not told(run), ran.stderr
    events = Run.open(run).events()
    starts = [event["t"] for event in events if event["event"] == "start"]
    resumed = next(event["t"] for event in events if event["event"] == "resume")
    assert resumed - starts[-1] > 25, json.dumps(events[-5:])
    assert list(steps(run)) == list(range(1, 7))
